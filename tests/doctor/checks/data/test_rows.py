"""Batches that repeat are found by the content of their rows, whatever gives them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import trainwright as tw
from tests.doctor.checks.data.loops import Batches, table, trained, warned
from trainwright.doctor.measure.rows import row_digests

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second

X, Y = table()
LOADER = DataLoader(TensorDataset(X, Y), 16, shuffle=True)


def slices(starts: Iterator[int]) -> Batches:
    return ((X[start : start + 16], Y[start : start + 16]) for start in starts)


def one_batch() -> Batches:
    batch = next(iter(LOADER))
    yield from itertools.repeat(batch, 24)


def forever() -> Batches:
    return itertools.islice(itertools.chain.from_iterable(itertools.repeat(LOADER)), 40)


FAULTY = {
    "one view": (lambda: slices(iter([16] * 24)), "data.batches_repeat"),
    "one batch of a loader": (one_batch, "data.batches_repeat"),
    "one view, then the others": (
        lambda: slices(itertools.chain([16] * 20, (16 * (step % 8) for step in range(20)))),
        "data.batches_repeat",
    ),
    "a cycle around a shuffled loader": (
        lambda: itertools.islice(itertools.cycle(LOADER), 40),
        "data.same_order_every_epoch",
    ),
}
HEALTHY = {
    "epochs": forever,
    "in order": lambda: slices(iter([16 * (step % 8) for step in range(40)])),
    "the whole set": lambda: itertools.repeat((X, Y), 24),
    "four updates on each batch": lambda: slices(iter([16 * (step // 4 % 8) for step in range(40)])),
    "a list of batches": lambda: itertools.chain.from_iterable(itertools.repeat(list(LOADER), 4)),
}


@pytest.mark.parametrize("name", FAULTY)
def test_repeated_batches_are_found(name: str) -> None:
    make, code = FAULTY[name]
    assert warned(trained(make())) == [code]


@pytest.mark.parametrize("name", HEALTHY)
def test_ways_to_read_batches_are_silent(name: str) -> None:
    assert warned(trained(HEALTHY[name]())) == []


def batches(x: Tensor, size: int) -> Iterator[Tensor]:
    while True:
        for start in range(0, len(x), size):
            yield x[start : start + size].clone()


def fresh(size: int) -> Iterator[Tensor]:
    while True:
        x = torch.randn(size, X.shape[1])
        yield x


def full() -> Iterator[Tensor]:
    x = X[:16].clone()
    while True:
        yield x


@pytest.mark.parametrize(
    ("source", "found"),
    [(batches(X, 16), True), (fresh(16), True), (LOADER, True), (full(), False), (batches(X[:16], 16), False)],
    ids=["of a set", "made", "loader", "the whole set", "one batch is the set"],
)
def test_a_batch_that_was_fetched_before_the_watch(source: Any, found: bool) -> None:
    x = next(iter(LOADER))[0] if source is LOADER else next(source)
    y = torch.randn(16, 1)
    model = nn.Linear(X.shape[1], 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for _ in range(16):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    assert watch.session.failures == []
    assert ("data.batches_repeat" in {each.code for each in watch.findings()}) == found


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Rows in their order; ``split`` between the workers, or not."""

    def __init__(self, split: bool) -> None:
        self.split = split

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        assert info is not None
        numbers = range(info.id, len(X), info.num_workers) if self.split else range(len(X))
        return ((X[number], Y[number]) for number in numbers)


@pytest.mark.process
@pytest.mark.parametrize(("split", "codes"), [(False, ["data.stream_read_by_every_worker"]), (True, [])])
def test_a_stream_is_split_between_workers(split: bool, codes: list[str]) -> None:
    assert warned(trained(DataLoader(Stream(split), 8, num_workers=2))) == codes


def test_a_number_within_the_batch_is_no_content() -> None:
    """As the vector that says which graph a node belongs to."""
    x, graphs = torch.randn(6, 4), torch.tensor([0, 0, 1, 1, 2, 2])
    one, again = row_digests([x, graphs]), row_digests([torch.cat([x[4:], x[:4]]), graphs])
    assert one is not None and again is not None
    assert sorted(one.tolist()) == sorted(again.tolist())


def test_equal_rows_have_equal_digests() -> None:
    x, tokens = torch.randn(6, 200), (torch.arange(6) + 1) % 3
    one, other = row_digests([x, tokens]), row_digests([x.flip(0), tokens.flip(0)])
    assert one is not None and other is not None
    assert one.tolist() == other.tolist()[::-1] and len(set(one.tolist())) == 6
    changed = row_digests([x, tokens + 1])
    assert changed is not None and not set(changed.tolist()) & set(one.tolist())
    assert row_digests([torch.tensor(3.0)]) is None
