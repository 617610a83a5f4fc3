"""model.json: the modules of a run as a tree, equal neighbours as one."""

from __future__ import annotations

import torch
from torch import nn

from trainwright.monitoring import module_tree as tree_module
from trainwright.monitoring.module_tree import model_facts, module_tree
from trainwright.runs.json_values import strict


def test_equal_blocks_are_one_node_with_a_count() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), *(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
    model.append(nn.Linear(4, 10, bias=False))
    model[4].weight = model[0].weight
    model[0].requires_grad_(False)
    tree = module_tree(model)
    sizes = (tree["kind"], tree["parameters"], tree["trained"])
    assert sizes == ("Sequential", 40 + 3 * 20, 60), "shared weights count once"
    embedding, blocks, head = tree["children"]
    assert [blocks[key] for key in ("name", "last", "count", "parameters")] == ["1", "3", 3, 20]
    assert [(each["kind"], each["parameters"]) for each in blocks["children"]] == [("Linear", 20), ("ReLU", 0)]
    assert (embedding["parameters"], embedding["trained"], head["parameters"], head["count"]) == (40, 0, 40, 1)


def test_blocks_that_differ_inside_are_told_apart() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.GELU()))
    assert [each["count"] for each in module_tree(model)["children"]] == [2, 1]


def test_what_has_no_size_yet_and_what_is_too_much_is_left_out() -> None:
    lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    assert module_tree(lazy)["parameters"] == 4
    chain = nn.Sequential(nn.Linear(1, 1))
    for _ in range(tree_module.MAX_DEPTH + 10):
        chain = nn.Sequential(chain)
    depth, node = 0, module_tree(chain)
    while node["children"]:
        depth, node = depth + 1, node["children"][0]
    assert depth == tree_module.MAX_DEPTH and node["parameters"] == 2


def test_it_is_json_of_a_model_without_memory_too() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 1)
    facts = strict(model_facts([model], {"bigram": 2.5}))
    assert facts == {
        "modules": [
            {"name": "", "kind": "Linear", "parameters": 4, "trained": 4, "children": [], "count": 1, "last": ""}
        ],
        "reference_losses": {"bigram": 2.5},
    }
