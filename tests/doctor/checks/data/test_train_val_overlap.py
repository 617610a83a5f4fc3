"""Rows that are trained on and evaluated are found by content, whatever their pattern and the way to read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second

TRAINED, HELD_OUT, SIZE = 128, 64, 16
APART = torch.randn(TRAINED + HELD_OUT, 6, generator=torch.Generator().manual_seed(0))
WHOLE = torch.randint(0, 50, APART.shape, generator=torch.Generator().manual_seed(0)).float()
CODES = torch.randint(0, 10, (TRAINED + HELD_OUT, 3), generator=torch.Generator().manual_seed(42)).float()
FEW = torch.randint(0, 2, (TRAINED + HELD_OUT, 3), generator=torch.Generator().manual_seed(0)).float()
Read = Callable[[Tensor, Tensor], Iterator[tuple[Tensor, Tensor]]]
Rows = Callable[[Tensor], Tensor]


def net(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 2))


def by_loader(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    yield from DataLoader(TensorDataset(x, y), SIZE)


def by_slices(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    yield from ((x[n : n + SIZE], y[n : n + SIZE]) for n in range(0, len(x), SIZE))


def at_once(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    yield x, y


def nothing(x: Tensor) -> Tensor:
    return x[TRAINED:]


def first_half(x: Tensor) -> Tensor:
    return torch.cat([x[: HELD_OUT // 2], x[TRAINED + HELD_OUT // 2 :]])


def last_tenth(x: Tensor) -> Tensor:
    return torch.cat([x[TRAINED:-7], x[:7]])


def every_second(x: Tensor) -> Tensor:
    mixed = x[TRAINED:].clone()
    mixed[::2] = x[: HELD_OUT // 2]
    return mixed


def shuffled(x: Tensor) -> Tensor:
    return first_half(x)[torch.randperm(HELD_OUT, generator=torch.Generator().manual_seed(2))]


def found(*evaluated: Rows, read: Read = by_loader, x: Tensor = APART) -> list[str]:
    """The warnings after four epochs, with an evaluation of each set after each of them."""
    torch.manual_seed(0)
    y = (x.sum(1) > x.sum(1).median()).long()
    model = net(x.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    sets = [(rows(x), rows(y)) for rows in evaluated]

    @torch.no_grad()
    def evaluate(x: Tensor, y: Tensor) -> float:
        return sum(float((model(rows).argmax(1) == targets).sum()) for rows, targets in read(x, y)) / len(x)

    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for _ in range(4):
            for rows, targets in by_loader(x[:TRAINED], y[:TRAINED]):
                optimizer.zero_grad()
                F.cross_entropy(model(rows), targets).backward()
                optimizer.step()
            for each in sets:
                evaluate(*each)
    assert watch.session.failures == []
    return [each.code for each in watch.findings() if each.severity == "warning" and each.code.startswith("data.")]


@pytest.mark.parametrize("read", [by_loader, by_slices, at_once], ids=lambda read: read.__name__)
@pytest.mark.parametrize("rows", [first_half, last_tenth, every_second, shuffled], ids=lambda rows: rows.__name__)
def test_an_overlap_is_found_whatever_its_pattern(rows: Rows, read: Read) -> None:
    assert found(rows, read=read) == ["data.train_val_overlap"]


@pytest.mark.parametrize("read", [by_loader, by_slices, at_once], ids=lambda read: read.__name__)
def test_sets_that_are_apart_hold(read: Read) -> None:
    assert found(nothing, read=read) == []


def test_training_rows_that_are_evaluated_on_purpose_are_no_proof() -> None:
    """Neither alone nor beside the validation set, by the same function."""
    assert found(lambda x: x[:TRAINED]) == []
    assert found(lambda x: x[:TRAINED], nothing) == []


@pytest.mark.parametrize(
    ("x", "rows", "codes"),
    [(WHOLE, first_half, ["data.train_val_overlap"]), (FEW, nothing, []), (CODES, nothing, [])],
    ids=["a leak", "few", "repeated in training only"],
)
def test_whole_numbers_may_be_equal_by_chance(x: Tensor, rows: Rows, codes: list[str]) -> None:
    assert found(rows, x=x) == codes


def test_copies_of_an_oversampled_class_are_found() -> None:
    """Every row of one class is in both sets several times, as after oversampling before the split."""
    assert found(lambda x: torch.cat([x[TRAINED:], *[x[:16]] * 3])) == ["data.train_val_overlap"]
    assert found(lambda x: torch.cat([x[TRAINED:], *[x[TRAINED : TRAINED + 16]] * 3])) == []
