"""Quarantine: what is never trained on leaves its place empty, and nothing else of the stream changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from trainwright.checkpoint.codec import same_bits
from trainwright.checkpoint.cursor import Cursor, StepBatch
from trainwright.data.loading import EvaluationBatches, Loading, StepBatches
from trainwright.errors import DataError

SIZE, BATCH, MICRO = 23, 8, 3  # an epoch is 8 + 8 + 7 samples, in micro-batches of 3 3 2, 3 3 2, 3 3 1
HOW = Loading(BATCH, MICRO, seed=5)
WHOLE = tuple(range(SIZE))


def noise() -> Tensor:
    return torch.tensor([random.random(), np.random.randn(), float(torch.randn(()))])


class Items(Dataset[tuple[Tensor, Tensor]]):
    """Sample ``broken`` cannot be read; the others draw random numbers, from the generators the batch shares."""

    def __init__(self, broken: tuple[int, ...] = (), size: int = SIZE) -> None:
        self.broken, self.size = broken, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = noise()
        if index in self.broken:
            raise OSError(f"cannot open image {index}")
        return torch.tensor(index), drawn


class Batched(Items):
    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        return [self[index] for index in indices]


class Fetching(Items):
    deterministic = True

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in self.broken:
            raise OSError(f"cannot open image {index}")
        return torch.tensor(index), torch.full((3,), float(index))

    def fetch_batch(self, ids: np.ndarray) -> tuple[Tensor, Tensor]:
        rows = [self[index] for index in ids.tolist()]
        return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])


class OnlyAtFirst(Items):
    """A server that was down in the first epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in self.broken and self.epoch == 0:
            raise ConnectionError("no route")
        return torch.tensor(index), noise()


class Moody(Items):
    """An augmentation that fails for what it drew, whichever sample it was given."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = noise()
        if drawn[0] < 0.06:
            raise ValueError("the crop is larger than the image")
        return torch.tensor(index), drawn


class Stream(IterableDataset[tuple[int, Tensor]]):
    def __init__(self, size: int = SIZE, broken: int | None = None) -> None:
        self.size, self.broken = size, broken

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        for position in range(self.size):
            if position == self.broken:
                raise OSError("the stream broke")
            yield position, noise()


def take(dataset: Any, steps: int, cursor: Cursor | None = None, **changes: Any) -> list[StepBatch]:
    how = replace(HOW, **changes)
    return list(islice(StepBatches(dataset, how, cursor=cursor), steps))


def ids(batches: list[StepBatch]) -> list[list[list[int]]]:
    """By step and micro-batch."""
    return [[micro.ids.tolist() for micro in batch.micro] for batch in batches]


def assert_same(a: list[StepBatch], b: list[StepBatch]) -> None:
    assert ids(a) == ids(b)
    assert [batch.cursor for batch in a] == [batch.cursor for batch in b]
    for one, other in zip(a, b, strict=True):
        for left, right in zip(one.micro, other.micro, strict=True):
            assert left.data[0].tolist() == left.ids.tolist()
            assert all(same_bits(x, y) for x, y in zip(left.data, right.data, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Items(), Batched(), Fetching(), Stream()], ids=lambda each: type(each).__name__)
def test_a_place_stays_empty_and_no_other_sample_moves(dataset: Any, workers: int) -> None:
    left_out = {4, 11, 12}
    usual, there = take(dataset, 6), take(dataset, 6, quarantine=frozenset(left_out), workers=workers)
    expected = [[[i for i in micro if i not in left_out] for micro in step] for step in ids(usual)]
    assert ids(there) == [[micro for micro in step if micro] for step in expected]
    assert [batch.cursor for batch in there] == [batch.cursor for batch in usual]
    assert [batch.size for batch in there] == [sum(map(len, step)) for step in expected]
    untouched = 0
    for one, other in zip(usual, there, strict=True):
        same = {tuple(micro.ids.tolist()): micro.data for micro in one.micro}
        for micro in other.micro:
            if before := same.get(tuple(micro.ids.tolist())):  # a micro-batch that lost no sample: its random numbers
                assert all(same_bits(x, y) for x, y in zip(before, micro.data, strict=True))
                untouched += 1
    assert untouched >= 8


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Items(), Stream()], ids=lambda each: type(each).__name__)
def test_a_sample_put_there_in_mid_epoch_loses_and_repeats_no_other(dataset: Any, workers: int) -> None:
    first = take(dataset, 1)
    late = int(take(dataset, 3)[1].ids[0])
    rest = take(dataset, 2, first[0].cursor, quarantine=frozenset({late}), workers=workers)
    seen = [int(i) for batch in [*first, *rest] for i in batch.ids]
    assert sorted(seen) == [i for i in WHOLE if i != late]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Items(), Stream()], ids=lambda each: type(each).__name__)
def test_an_empty_micro_batch_is_left_out_and_an_empty_step_passed_over(dataset: Any, workers: int) -> None:
    usual = take(dataset, 4, shuffle=False)
    closing = take(dataset, 3, shuffle=False, quarantine=frozenset({6, 7}), workers=workers)
    assert ids(closing) == [ids(usual)[0][:2], *ids(usual)[1:3]]
    assert closing[0].cursor == Cursor(0, 8)
    over = take(dataset, 4, shuffle=False, quarantine=frozenset(range(8, 16)), workers=workers)
    assert [batch.cursor for batch in over] == [Cursor(0, 8), Cursor(0, 23), Cursor(1, 8), Cursor(1, 23)]
    assert ids(over[:2]) == [ids(usual)[0], ids(usual)[2]]
    assert ids(take(dataset, 1, Cursor(0, 8), shuffle=False, quarantine=frozenset(range(8, 16)))) == [ids(usual)[2]]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_quarantine_of_everything_ends_the_stream(workers: int) -> None:
    everything = frozenset(WHOLE)
    assert take(Items(), 9, quarantine=everything, workers=workers) == []
    assert take(Stream(), 9, quarantine=everything, workers=workers) == []
    assert take(Items(), 9, Cursor(3, 8), quarantine=everything, workers=workers) == []
    tail = frozenset(range(16))  # what is left never comes into a whole batch
    assert take(Items(), 9, quarantine=tail, shuffle=False, drop_last=True, workers=workers) == []
    shuffled = take(Items(), 9, quarantine=tail, drop_last=True, workers=workers)
    assert {int(i) for batch in shuffled for i in batch.ids} <= set(range(16, SIZE))
    assert len(shuffled) == 9


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("make", [Items, Batched, Fetching])
def test_found_while_training_is_as_if_known_from_the_start(make: type[Items], workers: int) -> None:
    bad = (3, 4, 11)
    known = take(make(), 7, quarantine=frozenset(bad))
    found = take(make(bad), 7, on_bad_sample="quarantine", workers=workers)
    assert_same(found, known)
    told = [each for batch in found for each in batch.bad]
    assert sorted(each.id for each in told) == sorted(bad), "each once, though an epoch later they are met again"
    assert all(each.what == f"OSError: cannot open image {each.id}" for each in told)
    places = {int(i): at for at, batch in enumerate(take(make(), 3)) for i in batch.ids}
    assert {each.id: at for at, batch in enumerate(found) for each in batch.bad} == {i: places[i] for i in bad}


def test_found_in_a_step_that_comes_out_empty_travels_with_the_next() -> None:
    found = take(Items(tuple(range(8, 16))), 3, shuffle=False, on_bad_sample="quarantine")
    assert [batch.cursor for batch in found] == [Cursor(0, 8), Cursor(0, 23), Cursor(1, 8)]
    assert [[each.id for each in batch.bad] for batch in found] == [[], list(range(8, 16)), []]


@pytest.mark.slow
@pytest.mark.parametrize("make", [OnlyAtFirst, Moody])
def test_a_resumed_run_and_any_number_of_workers_give_the_same_bits(make: type[Items]) -> None:
    """Also when a sample could be read later, and workers have read it before it was found to be bad."""
    dataset = make((2, 9, 17))
    straight = take(dataset, 12, on_bad_sample="quarantine")
    assert sum(len(batch.bad) for batch in straight) >= 3
    for workers in (1, 2, 3):
        assert_same(take(dataset, 12, on_bad_sample="quarantine", workers=workers, prefetch=7), straight)
    quarantine: set[int] = set()
    for done in range(1, 12):
        quarantine.update(each.id for each in straight[done - 1].bad)
        here = {"on_bad_sample": "quarantine", "quarantine": frozenset(quarantine)}
        resumed = take(dataset, 12 - done, straight[done - 1].cursor, **here)
        assert_same(resumed, straight[done:])
        assert [batch.bad for batch in resumed] == [batch.bad for batch in straight[done:]]
    gone = {each.id for each in straight[0].bad}
    assert gone.isdisjoint(int(i) for batch in straight for i in batch.ids)


@pytest.mark.parametrize("workers", [0, 2])
def test_when_no_sample_can_be_read_it_says_so(workers: int) -> None:
    with pytest.raises(DataError, match=r"no sample is left.* 23 could not be read.* OSError: cannot open") as caught:
        take(Items(WHOLE), 99, on_bad_sample="quarantine", workers=workers)
    assert sorted(caught.value.sample_ids) == list(WHOLE)
    assert caught.value.remedy


class Ragged(Items):
    """The broken ones can be read and do not go with the others into one batch."""

    def __getitem__(self, index: int) -> Any:
        x, drawn = torch.tensor(index), noise()
        return (None if index % 2 else (x, drawn[:2])) if index in self.broken else (x, drawn)


class RaggedBatches(Ragged):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [Ragged, RaggedBatches])
def test_what_does_not_go_into_a_batch_is_left_out(make: type[Ragged], workers: int) -> None:
    bad = (4, 11)
    found = take(make(bad), 7, on_bad_sample="quarantine", workers=workers)
    assert_same(found, take(make(), 7, quarantine=frozenset(bad)))
    told = {each.id: each.what for batch in found for each in batch.bad}
    assert sorted(told) == sorted(bad)
    assert "it is (int64[], float32[2]), the others are (int64[], float32[3])" in told[4]
    assert "it is None" in told[11]


@pytest.mark.parametrize("collate", [default_collate, lambda samples: default_collate(samples)])
def test_nothing_in_a_micro_batch_of_its_own(collate: Any) -> None:
    found = take(Ragged((11,)), 23, batch_size=1, micro_size=1, on_bad_sample="quarantine", collate=collate)
    assert [each.id for batch in found for each in batch.bad] == [11]


class BatchesOnly(Items):
    deterministic = True

    def fetch_batch(self, ids: np.ndarray) -> Any:
        raise RuntimeError("the table is locked")


def no_collate(items: list[Any]) -> Tensor:
    raise ValueError("no such field")


@pytest.mark.parametrize(
    ("dataset", "changes", "said"),
    [
        (Ragged((10,)), {"batch_size": 2, "micro_size": 2, "shuffle": False}, r"one of the samples \[10, 11\]"),
        (BatchesOnly(), {}, "the table is locked"),
        (Items(), {"micro_size": 1, "collate": no_collate}, "no such field while collating"),
    ],
)
def test_what_is_not_the_fault_of_one_sample_stops(dataset: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        take(dataset, 99, on_bad_sample="quarantine", epochs=1, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_raises_stops_and_says_what_would_help(workers: int) -> None:
    with pytest.raises(DataError, match="OSError: the stream broke for sample 12") as caught:
        take(Stream(broken=12), 99, on_bad_sample="quarantine", workers=workers)
    assert "go on with the next sample" in caught.value.remedy


def test_evaluation_knows_no_quarantine() -> None:
    """The positions are those of another dataset, and a validation set that shrinks unseen would be a lie."""
    how = replace(HOW, quarantine=frozenset({0, 5}), on_bad_sample="quarantine")
    seen = [int(i) for micro in EvaluationBatches(Items(), how) for i in micro.ids]
    assert seen == list(WHOLE)
    with pytest.raises(DataError, match="sample 5"):
        list(EvaluationBatches(Items((5,)), how))


@pytest.mark.parametrize("seed", range(6))
def test_any_quarantine_from_any_place(seed: int) -> None:
    """Random sizes, batches, cursors and bad samples, against the definition."""
    draw = random.Random(seed)
    size, batch, micro = draw.randint(1, 30), draw.randint(1, 9), draw.randint(1, 5)
    left_out = frozenset(i for i in range(size) if draw.random() < draw.choice([0.1, 0.5, 0.9]))
    changes: dict[str, Any] = {"batch_size": batch, "micro_size": min(micro, batch), "epochs": 3, "seed": seed}
    changes |= {"drop_last": draw.random() < 0.5, "shuffle": draw.random() < 0.5}
    usual = take(Items(size=size), 999, **changes)
    expected = [(step.cursor, [i for i in step.ids.tolist() if i not in left_out]) for step in usual]
    for given in ({"quarantine": left_out}, {"on_bad_sample": "quarantine"}):
        dataset = Items(tuple(left_out) if "on_bad_sample" in given else (), size)
        got = take(dataset, 999, **changes, **given)
        assert [(step.cursor, step.ids.tolist()) for step in got] == [each for each in expected if each[1]]
        for done, step in enumerate(usual[:3], start=1):
            rest = take(dataset, 999, step.cursor, **changes, **given)
            assert [(s.cursor, s.ids.tolist()) for s in rest] == [each for each in expected[done:] if each[1]]
