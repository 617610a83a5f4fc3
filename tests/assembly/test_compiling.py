"""``model.compile: true`` compiles, whoever wrote ``forward``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from trainwright.assembly.assemble import Parts, compile_in_place, prepare
from trainwright.assembly.checkpointing import find_blocks
from trainwright.data.unwrap import unwrap
from trainwright.errors import RecipeError
from trainwright.recipe import from_mapping

pytestmark = [
    pytest.mark.slow,  # torch._dynamo is imported
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),  # of torch's own making
]


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


@pytest.mark.parametrize("make", [lambda: nn.Sequential(Own(), nn.ReLU()), lambda: nn.Linear(6, 3), Own])
def test_a_model_becomes_one_graph(make: type[nn.Module]) -> None:
    torch._dynamo.reset()
    counters.clear()
    model, x = make(), torch.randn(4, 6)
    names, expected = list(model.state_dict()), model(x)
    expected.sum().backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    compile_in_place(model, backend="aot_eager")
    assert torch.equal(model(x), expected)
    model(x).sum().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
    assert (counters["stats"]["unique_graphs"], len(counters["graph_break"])) == (1, 0)
    assert list(model.state_dict()) == names


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def prepared(model: nn.Module, setting: str) -> nn.Module:
    recipe = {"model": {"use": "mlp"}, "data": {"train": {"use": "digits"}}, "loss": "cross_entropy"}
    loaded = from_mapping({**recipe, "until": "1ep"}, overrides=[f"model.compile={setting}"])
    parts = Parts(model=model, train=unwrap([(torch.ones(6), 0)] * 4), val_sets={}, loss=nn.CrossEntropyLoss())
    return prepare(parts, loaded, torch.device("cpu")).model


def test_equal_blocks_are_compiled_once() -> None:
    torch._dynamo.reset()
    counters.clear()
    model, x = Deep(), torch.randn(4, 6, requires_grad=True)
    expected = model(x)
    for block in find_blocks(model):
        compile_in_place(block, backend="aot_eager")
    assert torch.equal(model(x), expected)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(("setting", "expected"), [("true", [""]), ("blocks", [f"blocks.{n}" for n in range(5)])])
def test_a_recipe_compiles_the_model_or_its_blocks(setting: str, expected: list[str]) -> None:
    modules = prepared(Deep(), setting).named_modules()
    assert [name for name, module in modules if module._compiled_call_impl is not None] == expected


def test_a_model_without_blocks() -> None:
    with pytest.raises(RecipeError, match="no list of equal blocks"):
        prepared(Own(), "blocks")
