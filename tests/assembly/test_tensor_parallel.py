"""A model divided among the ranks of a tensor axis computes what it does whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests import ranks
from trainwright.distributed.split_plan import model_shape, split_plan
from trainwright.errors import RecipeError, UsageError
from trainwright.models.gpt import gpt
from trainwright.models.hf import hf_model
from trainwright.models.mlp import mlp
from trainwright.plan.parallel import Degrees
from trainwright.plan.splits import nearest_divisor, require_fitting
from trainwright.recipe import Recipe, from_mapping

LLAMA: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

SAME = """
import copy, json, sys
import torch
import torch.nn.functional as F
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from trainwright.distributed.split_plan import split_plan
from trainwright.distributed.tensor_parallel import apply_tensor_parallelism
from trainwright.errors import UsageError
from trainwright.models.gpt import gpt
from trainwright.models.hf import hf_model

torch.set_num_threads(1)
distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))

def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

def gradients(model, ids):
    output = model(ids)
    logits = getattr(output, "logits", output)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), ids.roll(-1, 1).flatten())
    loss.backward()
    return float(loss), {name: whole(p.grad) for name, p in model.named_parameters()}

for options in json.loads(sys.argv[1]):
    sequence, make = options.pop("sequence", False), hf_model if "architecture" in options else gpt
    torch.manual_seed(0)
    model = make(**options)
    divided = copy.deepcopy(model)
    plan = split_plan(divided, {})
    apply_tensor_parallelism(divided, mesh, plan, sequence=sequence)
    frozen = copy.deepcopy(model).requires_grad_(False)
    apply_tensor_parallelism(frozen, mesh, plan, sequence=sequence)
    assert not [name for name, p in frozen.named_parameters() if p.requires_grad]
    count = sum(isinstance(p, DTensor) for p in divided.parameters())
    assert len(list(divided.parameters())) == len(list(model.parameters()))
    ids = torch.randint(11, (3, 8), generator=torch.Generator().manual_seed(1))
    (loss, grads), (wanted, references) = gradients(divided, ids), gradients(model, ids)
    assert abs(loss - wanted) <= 1e-6, (options, loss, wanted)
    assert grads.keys() == references.keys()
    for name, grad in grads.items():
        assert torch.allclose(grad, references[name], rtol=1e-4, atol=1e-6), (options, name)
    print(count, "of", len(grads))
try:
    divided(ids[:, :7])
except UsageError as error:
    print(error.message)
distributed.destroy_process_group()
"""


@pytest.mark.process
@pytest.mark.slow
def test_a_divided_model_has_the_loss_and_gradients_of_the_whole(tmp_path: Path) -> None:
    """Also where two ranks cannot divide the vocabulary evenly (11), where embedding and output layer share a weight,
    and with every kind of block."""
    small = {"vocab_size": 11, "block_size": 8, "layers": 2, "heads": 2, "d_model": 16}
    modern = {"norm": "rms", "positions": "rope", "activation": "swiglu", "qk_norm": True, "bias": False, "bigram": 64}
    models: list[dict[str, Any]] = [
        small,
        {**small, **modern, "tied": False, "logit_softcap": 5.0},
        {**LLAMA, "tie_word_embeddings": True},
        {**LLAMA, "architecture": "Qwen3ForCausalLM", "head_dim": 4},
        {**small, **modern, "sequence": True},
    ]
    done = ranks.finish(SAME, 2, json.dumps(models), cwd=tmp_path)
    *counts, refused = done[0].stdout.splitlines()
    assert len(counts) == len(models) and all(int(line.split()[0]) > 10 for line in counts)
    assert refused == "parallel.sequence: 7 positions cannot be divided among 2 ranks"


def shape_of(model: nn.Module) -> Any:
    return model_shape(model, split_plan(model, {}))


def recipe(**parallel: object) -> Recipe:
    made = {"model": "mlp", "data": {"train": "digits"}, "parallel": parallel}
    return from_mapping(made).recipe


def test_what_cannot_be_divided_is_refused_with_the_nearest_that_works() -> None:
    shape = shape_of(gpt(vocab_size=11, block_size=8, layers=1, heads=6, d_model=24))
    with pytest.raises(RecipeError, match=r"6 attention heads(?s:.)*tensor: 3"):
        require_fitting(recipe(), Degrees(tensor=4), shape)
    require_fitting(recipe(sequence=True), Degrees(tensor=3), shape)
    grouped = shape_of(hf_model(**LLAMA))
    with pytest.raises(RecipeError, match=r"2 KV heads(?s:.)*tensor: 2"):
        require_fitting(recipe(), Degrees(tensor=4), grouped)
    with pytest.raises(RecipeError, match=r"parallel.sequence"):
        require_fitting(recipe(sequence=True), Degrees(tensor=2), grouped)
    assert [nearest_divisor([12, 24], asked) for asked in (5, 7, 8, 100)] == [6, 6, 6, 12]


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        ({}, "MLP has no plan"),
        ({"layer.linear*": "column"}, "no module is named like 'layer.linear.*'(?s:.)*'layers.linear0'"),
        ({"layers.activation0": "column"}, "layers.activation0 is a ReLU, and column divides"),
    ],
)
def test_a_plan_that_does_not_fit_its_model_is_refused(plan: Any, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        split_plan(mlp(sizes=[4, 8, 2]), plan)


def test_a_weight_in_two_places_is_divided_in_one_way() -> None:
    model = gpt(vocab_size=12, block_size=8, layers=1, heads=2, d_model=8)
    assert split_plan(model, {"head": "column_gathered"}) == {"head": "column_gathered", "tokens": "row"}
    with pytest.raises(UsageError, match="one weight is used in several places"):
        split_plan(model, {"head": "column", "tokens": "column"})
