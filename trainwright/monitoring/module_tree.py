"""The modules of a model as a tree of plain values (names, classes and parameters), for the page of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from torch import nn
from torch.nn.parameter import is_lazy

from trainwright.runs.json_values import Facts

MAX_MODULES = 2000
"""Maximum number of modules in a tree. The tree of a larger model has fewer levels."""
MAX_DEPTH = 32


def module_tree(model: nn.Module) -> Facts:
    """Return the tree of ``model``: of each module its name, class (``kind``), parameters and submodules.

    ``parameters`` counts shared parameters in each module that has them. Equal neighbours, as the blocks of a
    transformer, are one node: ``count`` modules from ``name`` to ``last``, each with this number of parameters.
    """
    return _node("", model, _depth_of(model))


def model_facts(models: Sequence[nn.Module], references: Mapping[str, float] = MappingProxyType({})) -> object:
    """Return the content of model.json: the trees, and reference losses by name, such as that of a bigram model."""
    return {"modules": [module_tree(model) for model in models], "reference_losses": dict(references)}


def _depth_of(model: nn.Module) -> int:
    """Return the number of levels with at most MAX_MODULES modules."""
    level = [model]
    depth = 0
    seen = 1
    while level and seen <= MAX_MODULES and depth < MAX_DEPTH:
        level = [child for module in level for child in module.children()]
        depth, seen = depth + 1, seen + len(level)
    return depth - 1 if seen > MAX_MODULES else depth


def _node(name: str, module: nn.Module, depth: int) -> Facts:
    parameters = [each for each in module.parameters() if not is_lazy(each)]
    children = module.named_children() if depth > 0 else ()
    return {
        "name": name,
        "kind": type(module).__name__,
        "parameters": sum(each.numel() for each in parameters),
        "trained": sum(each.numel() for each in parameters if each.requires_grad),
        "children": _joined(_node(*child, depth - 1) for child in children),
        "count": 1,
        "last": "",
    }


def _joined(nodes: Iterable[Facts]) -> list[Facts]:
    joined: list[Facts] = []
    for node in nodes:
        if joined and {**joined[-1], "name": node["name"], "count": 1, "last": ""} == node:
            joined[-1] |= {"count": joined[-1]["count"] + 1, "last": node["name"]}
        else:
            joined.append(node)
    return joined
