"""The phase of a stack of frames, asked from within real code of each phase."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import trainwright as tw
from trainwright.profiling import tracing
from trainwright.profiling.tracing import HostPlace, place_of

SEEN: dict[str, HostPlace] = {}


def note(name: str) -> None:
    SEEN.setdefault(name, place_of(sys._getframe(1)))


class Data(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        note("data")
        return torch.randn(4), torch.tensor(index % 2)


class Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        note("backward")
        return grad


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        note("forward")
        return Noting.apply(self.linear(x))


class Stepping(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        note("update")
        super().step()


def test_of_a_loop_that_somebody_else_owns() -> None:
    SEEN.clear()
    model = Model()
    optimizer = Stepping(model.parameters(), 0.1)
    for x, y in DataLoader(Data(), batch_size=4):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        note("loop")
    assert {name: place.phase for name, place in SEEN.items()} == {name: name for name in SEEN}
    assert SEEN.keys() == {"data", "forward", "backward", "update", "loop"}
    assert SEEN["data"].label == "Data.__getitem__"
    assert SEEN["forward"].site.startswith("test_stack.py:")


def test_of_our_own_loop(tmp_path: Any) -> None:
    SEEN.clear()

    def looks(result: Any, state: Any) -> None:
        note("looking")

    model = Model()
    settings = {"folder": str(tmp_path), "log.doctor": False, "evaluation.every": "1steps"}
    loss = nn.CrossEntropyLoss()
    optimizer = Stepping(model.parameters(), 0.1)
    tw.fit(model, Data(), loss, steps=2, batch=4, optimizer=optimizer, observers=[looks], settings=settings, quiet=True)
    phases = {name: place.phase for name, place in SEEN.items()}
    assert phases.pop("looking") == "looking"
    assert SEEN["looking"].label == "looks"
    del phases["forward"], phases["backward"], phases["data"]  # the first of each was in the dry run
    assert phases == {"update": "update"}


def test_every_file_of_the_table_exists() -> None:
    """Otherwise a renamed module would lose its phase without an error."""
    for key in tracing._FILES:
        name, _, function = key.partition(":")
        assert Path(name).exists(), name
        assert f"def {function}" in Path(name).read_text() if function else True, key
