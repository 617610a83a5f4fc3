"""Checks of loaders: samples that never come, their order, their labels, and their workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from tests.doctor.checks.data.loops import Batches, exam, said, table, trained, warned
from trainwright.doctor.checks.data.empty_loader import empty_loader
from trainwright.doctor.checks.data.same_order_every_epoch import same_order_every_epoch
from trainwright.doctor.checks.data.samples_never_drawn import samples_never_drawn
from trainwright.doctor.checks.data.train_val_overlap import train_val_overlap
from trainwright.doctor.checks.data.unshuffled import unshuffled
from trainwright.doctor.checks.data.worker_rng_duplicate import worker_rng_duplicate
from trainwright.doctor.facts.data import (
    DrawnSamples,
    EmptyLoader,
    EpochRepeat,
    LoaderOverlap,
    LoadersFacts,
    WorkerDraws,
)

X, Y = table()


def epochs(loader: DataLoader[Any], number: int, batches: int | None = None) -> Batches:
    return itertools.chain.from_iterable(itertools.islice(loader, batches) for _ in range(number))


def resumed(*, skipped: int) -> Batches:
    """The first 4 batches of an epoch, and after a restart with the same order those behind ``skipped``."""
    order = torch.Generator()
    loader = DataLoader(TensorDataset(X, Y), 16, shuffle=True, generator=order)
    for begin in (0, skipped):
        order.manual_seed(1)
        yield from itertools.islice(loader, begin, begin + 4)


@pytest.mark.slow
@pytest.mark.parametrize(("skipped", "codes"), [(0, ["data.same_order_every_epoch"]), (4, [])])
def test_an_epoch_that_is_resumed_skips_its_batches(skipped: int, codes: list[str]) -> None:
    assert [each for each in warned(trained(resumed(skipped=skipped))) if "order" in each] == codes


def weighted(weights: Tensor) -> Batches:
    sampler = WeightedRandomSampler(weights.tolist(), 128)
    return epochs(DataLoader(TensorDataset(X, Y), 16, sampler=sampler), 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "codes"),
    [
        (lambda: weighted(torch.ones(4)), ["data.samples_never_drawn"]),
        (lambda: epochs(DataLoader(TensorDataset(X, Y), 16), 4, batches=4), ["data.samples_never_drawn"]),
        (lambda: weighted(torch.ones(128)), []),
        (lambda: epochs(DataLoader(TensorDataset(X, Y), 16, shuffle=True), 4, batches=4), []),
        (lambda: epochs(DataLoader(TensorDataset(X, Y), 16, sampler=SubsetRandomSampler(range(16))), 40), []),
    ],
    ids=["weights of classes", "left early, in order", "weights of samples", "left early, shuffled", "a part"],
)
def test_samples_that_never_come(make: Any, codes: list[str]) -> None:
    assert warned(trained(make())) == codes


def one_iterator_each(loader: DataLoader[Any]) -> Iterator[Any]:
    return (next(iter(loader)) for _ in range(12))


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("workers", "codes"),
    [(1, ["data.workers_restarted_each_step"]), (0, [])],
)
def test_workers_that_restart_in_each_step(workers: int, codes: list[str]) -> None:
    loader = DataLoader(TensorDataset(X, Y), 16, shuffle=True, num_workers=workers)
    assert warned(trained(one_iterator_each(loader))) == codes


@pytest.mark.slow
@pytest.mark.process
def test_workers_of_long_epochs_start_once_each() -> None:
    assert warned(trained(epochs(DataLoader(TensorDataset(X, Y), 16, shuffle=True, num_workers=1), 3))) == []


def test_an_empty_loader_has_no_length() -> None:
    def empty(length: int | None, epochs: int = 1) -> LoadersFacts:
        each = EmptyLoader(epochs=epochs, samples=20, batch_size=32, drop_last=True, length=length)
        return LoadersFacts(empty=(each,))

    assert said(empty_loader, exam(0, empty(0))) == ["critical"]
    assert said(empty_loader, exam(0, empty(None, 2))) == ["critical"]
    assert not said(empty_loader, exam(0, empty(3)))
    assert not said(empty_loader, exam(0, empty(None)))


@pytest.mark.parametrize(("sampler", "severities"), [("WeightedRandomSampler", ["warning"]), ("NoneType", [])])
def test_a_stream_without_a_sampler_has_no_samples_to_draw(sampler: str, severities: list[str]) -> None:
    drawn = DrawnSamples(samples=40, draws=800, distinct=20, same_set=True, chooses=False, sampler=sampler)
    assert said(samples_never_drawn, exam(16, LoadersFacts(drawn=(drawn,)))) == severities


def repeat(**more: Any) -> Any:
    seen = {"equal": 8, "batches": 8, "samples": 512, "ascending": False, "random": True, "distributed": False}
    return exam(16, LoadersFacts(repeats=(EpochRepeat(**seen | {"sampler": "RandomSampler"} | more),)))


def test_the_same_order_is_a_fault_of_a_sampler_that_should_draw_another() -> None:
    assert said(same_order_every_epoch, repeat()) == ["warning"]
    assert said(same_order_every_epoch, repeat(distributed=True)) == ["warning"]
    assert said(same_order_every_epoch, repeat(random=False, sampler="list")) == ["info"]
    assert not said(same_order_every_epoch, repeat(ascending=True))
    assert not said(same_order_every_epoch, repeat(equal=3))


def test_shared_samples_are_meant_where_another_evaluation_has_none() -> None:
    shared = LoaderOverlap(samples=128, shared=128, trained=512, same_loader=False)
    few = LoaderOverlap(samples=128, shared=8, trained=512, same_loader=False)
    apart = LoaderOverlap(samples=128, shared=0, trained=512, same_loader=False)
    assert said(train_val_overlap, exam(9, LoadersFacts(overlaps=(shared,)))) == ["warning"]
    assert said(train_val_overlap, exam(9, LoadersFacts(overlaps=(few,)))) == ["warning"]
    assert said(train_val_overlap, exam(9, LoadersFacts(overlaps=(shared, apart)))) == ["info"]
    partly = replace(shared, shared=64)
    assert said(train_val_overlap, exam(9, LoadersFacts(overlaps=(partly, apart)))) == ["warning"]
    first = DrawnSamples(samples=1024, draws=512, distinct=512, same_set=False, chooses=False, sampler="")
    assert said(train_val_overlap, exam(9, LoadersFacts(overlaps=(partly, apart), drawn=(first,)))) == ["info"]
    assert not said(train_val_overlap, exam(9, LoadersFacts(overlaps=(apart,))))


@pytest.mark.parametrize(
    ("random", "workers", "epochs", "found"),
    [(True, True, False, 1), (True, False, True, 1), (False, True, True, 0), (True, False, False, 0)],
)
def test_workers_that_draw_alike(random: bool, workers: bool, epochs: bool, found: int) -> None:
    drawn = WorkerDraws(workers=2, init=False, random=random, equal_workers=workers, equal_epochs=epochs)
    assert len(said(worker_rng_duplicate, exam(1, LoadersFacts(workers=drawn)))) == found


@pytest.mark.parametrize(
    ("entropy", "mixed", "ascending", "severities"),
    [
        (0.2, (2.0, 2.1), True, ["critical"]),
        (0.6, (1.4, 1.6), True, ["critical"]),
        (2.05, (2.0, 2.1), True, []),
        (0.02, (0.0, 0.05), True, []),
        (0.2, (0.1, 0.45), True, []),
        (0.2, (2.0, 2.1), False, ["info"]),
    ],
    ids=["pure", "two classes", "mixed", "nearly all of one class", "batches of two", "grouped on purpose"],
)
def test_pure_batches(entropy: float, mixed: tuple[float, ...], ascending: bool, severities: list[str]) -> None:
    facts = LoadersFacts(entropies=(entropy,) * 4, mixed=mixed, ascending=ascending)
    assert said(unshuffled, exam(2, facts)) == severities


class Stored(Dataset[tuple[Tensor, Tensor]]):
    """Normalises its samples when they are read, in place or not."""

    def __init__(self, *, in_place: bool) -> None:
        self.x, self.in_place = X.clone(), in_place

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index] if self.in_place else self.x[index].clone()
        return x.sub_(0.1).div_(0.5), Y[index]


@pytest.mark.slow
@pytest.mark.parametrize(("in_place", "codes"), [(True, ["data.changed_in_place"]), (False, [])])
def test_stored_samples_that_are_modified(in_place: bool, codes: list[str]) -> None:
    watch = trained(epochs(DataLoader(Stored(in_place=in_place), 16, shuffle=True), 4))
    assert warned(watch) == codes
    if codes:
        [found] = [each for each in watch.findings() if each.code == codes[0]]
        assert found.since_step == 9 and (found.where.source or "").startswith("test_loaders.py:")


def test_an_evaluation_by_a_loader_is_no_draw_for_training() -> None:
    """The first batch of each evaluation is read while the model is still in train mode."""
    batches, held_out = DataLoader(TensorDataset(X, Y), 16, shuffle=True), DataLoader(TensorDataset(X[:96], Y[:96]), 16)

    def end(model: torch.nn.Module, step: int) -> None:
        if step % 8 == 7:
            for x, _ in held_out:
                model.eval()
                with torch.no_grad():
                    model(x)
            model.train()

    assert "data.samples_never_drawn" not in warned(trained(epochs(batches, 4), end=end))
