"""The stream of batches: every sample once an epoch, in an order that nothing but (seed, epoch, position) decides."""

from __future__ import annotations

import itertools
import random
import sys
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from trainwright.checkpoint.codec import same_bits
from trainwright.checkpoint.cursor import Cursor, StepBatch, count_tokens
from trainwright.checkpoint.rng import RngBag, seed_all
from trainwright.data.fetch import batch_seed, sample_seed
from trainwright.data.loading import EvaluationBatches, Loading, StepBatches, to_device
from trainwright.data.unwrap import length_of, unwrap
from trainwright.errors import DataError, UsageError

SIZE, BATCH, MICRO = 23, 8, 3  # an epoch is 8 + 8 + 7 samples, in micro-batches of 3 3 2, 3 3 2, 3 3 1


def noise() -> Tensor:
    """Draws from every global generator, several times of a kind that keeps a spare value."""
    return torch.tensor(
        [random.random(), random.gauss(0, 1), np.random.randn(), float(torch.randn(())), np.random.rand()]
    )


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in getattr(self, "broken", ()):
            raise OSError(f"cannot open image {index}\nand more")
        return torch.tensor(index), noise()


class AugmentedStream(IterableDataset[tuple[Tensor, Tensor]]):
    """Shuffles through a buffer of 5 from the global generators, already when it is asked for an iterator."""

    def __init__(self, size: int = SIZE, broken: int | None = None) -> None:
        self.size, self.broken = size, broken

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        start = random.randrange(self.size) + int(torch.randint(self.size, ())) + np.random.randint(self.size)
        return self.walk(start)

    def walk(self, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        source = ((start + i) % self.size for i in range(self.size))
        buffer = list(itertools.islice(source, 5))
        for given, new in enumerate(itertools.chain(source, [None] * 5)):
            if given == self.broken:
                raise OSError("the stream broke")
            at = random.randrange(len(buffer))
            value = buffer[at]
            if new is None:
                buffer.pop(at)
            else:
                buffer[at] = new
            yield torch.tensor(value), noise()


def take(dataset: Any, count: int, cursor: Cursor | None = None, **options: Any) -> list[StepBatch]:
    loading = Loading(**{"batch_size": BATCH, "micro_size": MICRO, "seed": 5, **options})
    return list(itertools.islice(StepBatches(dataset, loading, cursor=cursor), count))


def assert_equal(a: list[StepBatch], b: list[StepBatch]) -> None:
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert one.cursor == other.cursor
        assert [m.ids.tolist() for m in one.micro] == [m.ids.tolist() for m in other.micro]
        for left, right in zip(one.micro, other.micro, strict=True):
            assert all(same_bits(x, y) for x, y in zip(left.data, right.data, strict=True))


def samples(batches: list[StepBatch]) -> list[int]:
    return [int(value) for batch in batches for micro in batch.micro for value in micro.data[0]]


@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_once_an_epoch_each_in_another_order(workers: int) -> None:
    batches = take(Augmented(), 12, workers=workers)
    assert [batch.size for batch in batches] == [8, 8, 7] * 4
    assert [[micro.size for micro in batch.micro] for batch in batches[:3]] == [[3, 3, 2], [3, 3, 2], [3, 3, 1]]
    assert samples(batches) == [int(i) for batch in batches for i in batch.ids]
    epochs = [samples(batches[at : at + 3]) for at in range(0, 12, 3)]
    assert all(sorted(epoch) == list(range(SIZE)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [batch.cursor for batch in batches[:4]] == [Cursor(0, 8), Cursor(0, 16), Cursor(0, 23), Cursor(1, 8)]


def test_the_order_depends_on_seed_epoch_and_position_alone() -> None:
    seed_all(1)
    first = take(Augmented(), 6)
    seed_all(2)
    assert_equal(take(Augmented(), 6), first)
    assert samples(take(Augmented(), 6, seed=6)) != samples(first)
    regrouped = samples(take(Augmented(), 12, batch_size=4, micro_size=1))  # 6 steps an epoch instead of 3
    assert regrouped == samples(first)
    assert samples(take(Augmented(), 3, shuffle=False)) == list(range(SIZE))


def by_sample(batches: list[StepBatch]) -> dict[int, list[float]]:
    """Return the random numbers drawn for each sample."""
    rows = [(micro.data[0].tolist(), micro.data[1].tolist()) for batch in batches for micro in batch.micro]
    return {index: drawn for indices, noises in rows for index, drawn in zip(indices, noises, strict=True)}


@pytest.mark.parametrize("kind", ["items", "subset", "stream"])
@pytest.mark.parametrize(("micro", "workers"), [(8, 0), (1, 0), (5, 0), (4, 2)])
def test_a_sample_is_the_same_in_any_micro_batch(kind: str, micro: int, workers: int) -> None:
    dataset: Any = AugmentedStream() if kind == "stream" else Augmented()
    if kind == "subset":  # as random_split makes them: torch gives it a __getitems__, which reads one by one
        dataset = Subset(Subset(dataset, range(SIZE)), range(SIZE))
    expected = by_sample(take(dataset, 3))
    assert len({tuple(row) for row in expected.values()}) == SIZE
    assert by_sample(take(dataset, 3, micro_size=micro, workers=workers)) == expected
    if kind != "stream":
        assert by_sample(take(dataset, 6, batch_size=4, micro_size=2)) == expected
        assert by_sample(take(dataset, 3, shuffle=False)) == expected
        assert by_sample(take(dataset, 3, Cursor(1, 0))) != expected


@pytest.mark.parametrize("make", [Augmented, AugmentedStream])
def test_the_same_bits_with_any_number_of_workers(make: type) -> None:
    expected = take(make(), 7)
    assert_equal(take(make(), 7, workers=3), expected)
    draws = torch.cat([micro.data[1] for batch in expected for micro in batch.micro])
    assert len({tuple(row) for row in draws.tolist()}) == len(draws)  # each sample has noise of its own


@pytest.mark.parametrize("make", [Augmented, AugmentedStream])
@pytest.mark.parametrize("workers", [0, 2])
def test_it_resumes_from_any_cursor(make: type, workers: int) -> None:
    whole = take(make(), 7)
    for done in range(1, 7) if workers == 0 else (2, 3):
        assert_equal(take(make(), 7 - done, whole[done - 1].cursor, workers=workers), whole[done:])


def test_a_resumed_stream_may_be_cut_into_other_batches() -> None:
    """Another machine, another micro-batch: still no sample twice, none left out."""
    whole = samples(take(AugmentedStream(), 3))
    rest = take(AugmentedStream(), 3, Cursor(0, 8), batch_size=5, micro_size=5)
    assert [batch.size for batch in rest] == [5, 5, 5]
    assert whole[8:] == samples(rest)
    assert [int(i) for batch in rest for i in batch.ids] == list(range(8, SIZE))


@pytest.mark.parametrize("make", [Augmented, AugmentedStream])
@pytest.mark.parametrize("workers", [0, 2])
def test_loading_leaves_the_generators_of_the_training_process_alone(make: type, workers: int) -> None:
    seed_all(3)
    before = RngBag.capture()
    take(make(), 5, Cursor(0, 8), workers=workers)
    after = RngBag.capture()
    assert torch.equal(before.torch_cpu, after.torch_cpu)
    assert before.python == after.python
    assert np.array_equal(before.numpy["state"]["key"], after.numpy["state"]["key"])
    assert before.numpy["state"]["pos"] == after.numpy["state"]["pos"]


class Drawing:
    """A collate function that draws: masked language modelling, mixup."""

    def __call__(self, items: list[Any]) -> Any:
        index, _ = default_collate(items)
        return index, noise()


@pytest.mark.process
@pytest.mark.parametrize("make", [Augmented, AugmentedStream])
def test_a_collate_function_that_draws_is_the_same_in_any_worker(make: type) -> None:
    expected = take(make(), 5, collate=Drawing())
    assert_equal(take(make(), 5, collate=Drawing(), workers=2), expected)
    seed_all(77)
    assert_equal(take(make(), 5, collate=Drawing()), expected)


class Counting(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


@pytest.mark.parametrize(("size", "workers"), [(4, 0), (8, 0), (11, 0), (12, 0), (12, 2), (14, 0), (16, 0)])
def test_an_epoch_of_a_stream_never_flows_into_the_next(size: int, workers: int) -> None:
    """Also where it ends exactly with a micro-batch in the middle of a step (12 = 8 + 4)."""
    full, rest = divmod(size, 8)
    expected = [8] * full + [rest] * (rest > 0)
    got = [batch.size for batch in take(Counting(size), 2 * len(expected), micro_size=4, workers=workers)]
    assert got == expected * 2
    dropped = take(Counting(size), 2 * full, micro_size=4, workers=workers, drop_last=True)
    assert [batch.size for batch in dropped] == [8] * (2 * full)
    assert [batch.cursor for batch in dropped][full : full + 1] == [Cursor(1, 8)] * (full > 0)


class Sharding(IterableDataset[int]):
    """As torch's documentation teaches it, and as ``datasets`` does it: each worker takes its share."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return iter(range(worker.id if worker else 0, SIZE, worker.num_workers if worker else 1))


def test_a_stream_that_shards_itself_loses_nothing() -> None:
    for workers in (0, 1, 3):
        values = [int(v) for batch in take(Sharding(), 3, workers=workers) for micro in batch.micro for v in micro.data]
        assert values == list(range(SIZE))


class OneShot(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.items = iter(range(size))

    def __iter__(self) -> Iterator[int]:
        return self.items


@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_that_can_be_read_once_ends(workers: int) -> None:
    assert [batch.size for batch in take(OneShot(20), 99, workers=workers)] == [8, 8, 4]
    assert take(OneShot(0), 99, workers=workers) == []


@pytest.mark.slow
@pytest.mark.parametrize("make", [Augmented, AugmentedStream])
@pytest.mark.parametrize("workers", [0, 2])
def test_drop_last_where_an_epoch_goes_on_in_batches_of_another_size(make: type, workers: int) -> None:
    """23 samples: 8 are done, the other 15 are 3 batches of 5, or one of 9; the next epoch is cut anew."""
    fives = take(make(), 5, Cursor(0, 8), batch_size=5, micro_size=2, drop_last=True, workers=workers)
    assert [batch.size for batch in fives] == [5] * 5
    assert [batch.cursor for batch in fives][2:4] == [Cursor(0, 23), Cursor(1, 5)]
    nines = take(make(), 4, Cursor(0, 8), batch_size=9, micro_size=9, drop_last=True, workers=workers)
    assert [batch.cursor for batch in nines] == [Cursor(0, 17), Cursor(1, 9), Cursor(1, 18), Cursor(2, 9)]
    tens = take(make(), 1, Cursor(0, 16), batch_size=10, micro_size=10, drop_last=True, workers=workers)
    assert [batch.cursor for batch in tens] == [Cursor(1, 10)]


def test_a_set_that_fills_no_batch_gives_none_instead_of_searching_for_ever() -> None:
    assert take(Augmented(5), 99, drop_last=True) == []
    assert take(Augmented(0), 99) == []
    assert [batch.size for batch in take(Augmented(5), 2)] == [5, 5]


@pytest.mark.parametrize("make", [Augmented, AugmentedStream])
def test_epochs_end_it(make: type) -> None:
    assert sum(batch.size for batch in take(make(), 99, epochs=2)) == 2 * SIZE
    assert sum(batch.size for batch in take(make(), 99, Cursor(1, 8), epochs=2)) == SIZE - 8


class Curriculum(Augmented):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(index), torch.tensor(self.epoch)


class CurriculumStream(Counting):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter([(i, self.epoch) for i in range(self.size)])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Curriculum(), CurriculumStream(SIZE)], ids=["map", "stream"])
def test_a_dataset_is_told_the_epoch(dataset: Any, workers: int) -> None:
    batches = take(dataset, 6, Cursor(4, 16), workers=workers)
    told = [set(torch.cat([micro.data[1] for micro in batch.micro]).tolist()) for batch in batches]
    assert told == [{4}, {5}, {5}, {5}, {6}, {6}]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["items", "subset", "stream"])
def test_a_dataset_that_raises_names_the_sample(kind: str, workers: int) -> None:
    dataset: Any = Augmented(200)
    dataset.broken = (137,)
    if kind == "subset":  # a batched __getitems__: which item raised is found one by one
        dataset.broken = (150,)
        dataset = Subset(dataset, [*range(137), 150])
    if kind == "stream":
        dataset = AugmentedStream(200, broken=137)
    said = "OSError: the stream broke" if kind == "stream" else "OSError: cannot open image"
    given: list[StepBatch] = []
    with pytest.raises(DataError, match=f"{said}.*for sample 137") as caught:
        for batch in StepBatches(dataset, Loading(BATCH, MICRO, seed=5, workers=workers)):
            given.append(batch)  # noqa: PERF402  # those before the error
    assert caught.value.sample_ids == (137,)
    assert "\n" not in caught.value.message
    assert caught.value.remedy
    before = {int(i) for batch in given for i in batch.ids}
    assert 137 not in before
    assert all(batch.size == BATCH for batch in given)
    assert kind != "stream" or before == set(range(136))  # all whole steps before it were handed out


class Ragged(Augmented):
    def __getitem__(self, index: int) -> Any:
        return torch.ones(3 if index == 11 else 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_does_not_collate_is_named(workers: int) -> None:
    with pytest.raises(
        DataError, match=r"while collating \(it is float32\[3\], the others are float32\[2\]\)"
    ) as caught:
        take(Ragged(), 99, workers=workers, epochs=1)
    assert caught.value.sample_ids == (11,)

    class RaggedStream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter([torch.ones(2)] * 11 + [torch.ones(3)] + [torch.ones(2)] * 11)

    with pytest.raises(DataError, match="while collating") as caught:
        take(RaggedStream(), 99, epochs=1)
    assert caught.value.sample_ids == (11,)


def test_samples_of_different_lengths_are_to_be_padded() -> None:
    rows = [{"ids": [1] * n, "label": 0} for n in (1, 2, 3, 4)]
    with pytest.raises(DataError, match="while collating") as caught:
        take(rows, 1, epochs=1)
    assert "collate_fn=tw.pad()" in caught.value.remedy


def test_samples_of_which_none_collates_need_another_form() -> None:
    with pytest.raises(DataError) as caught:
        take([(object(), n) for n in range(4)], 1, epochs=1)
    assert "ToTensor()" in caught.value.remedy


class Odd(Augmented):
    """Sample 11 is not what ``make`` makes of the others."""

    def __init__(self, eleven: Any) -> None:
        super().__init__()
        self.eleven = eleven

    def __getitem__(self, index: int) -> Any:
        return self.eleven if index == 11 else {"x": torch.ones(2), "name": (index, "text")}


ODD = {
    "nothing": (None, "it is None"),
    "a shape": ({"x": torch.ones(3), "name": (11, "text")}, r"it is {x: float32\[3\], name: \(int, str\)}, the others"),
    "a key less": ({"x": torch.ones(2)}, r"it is {x: float32\[2\]}, the others are {x: float32\[2\], name:"),
    "unknown": (object(), "it is object"),
}


@pytest.mark.parametrize("kind", list(ODD))
def test_a_sample_of_another_form(kind: str) -> None:
    eleven, said = ODD[kind]
    with pytest.raises(DataError, match=said) as caught:
        take(Odd(eleven), 99, epochs=1)
    assert caught.value.sample_ids == (11,)


def test_where_no_sample_can_be_blamed_all_are_named() -> None:
    """With two equally frequent shapes, neither is the usual one."""
    with pytest.raises(DataError, match="one of the samples") as caught:
        take(Ragged(), 99, batch_size=2, micro_size=2, shuffle=False, epochs=1)
    assert caught.value.sample_ids == (10, 11)


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Unspeakable(Augmented):
    def __init__(self, error: type[BaseException] = UnspeakableError) -> None:
        super().__init__()
        self.error = error

    def __getitem__(self, index: int) -> Any:
        if index == 11:
            raise self.error()
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", [UnspeakableError, SystemExit])
def test_an_exception_of_any_kind_names_its_sample(error: type[BaseException], workers: int) -> None:
    """One that raises when it is printed, and one that would end the process."""
    with pytest.raises(DataError, match=f"{error.__name__}.* for sample 11") as caught:
        take(Unspeakable(error), 99, workers=workers, epochs=1)
    assert "dataset[i]" in caught.value.remedy


class HuggingFaceLike:
    """Rows are dicts; ``__getitems__`` gives a list of them."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.arange(4) + index, "meta": {"name": f"row {index}", "length": 4}}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


def test_batches_of_dicts() -> None:
    (batch,) = take(unwrap(HuggingFaceLike()).dataset, 1, shuffle=False)
    data = batch.micro[1].data
    assert data["input_ids"].tolist() == [[3, 4, 5, 6], [4, 5, 6, 7], [5, 6, 7, 8]]
    assert data["meta"]["name"] == ["row 3", "row 4", "row 5"]
    assert batch.tokens == 32


def test_evaluation_is_one_pass_in_order_again_and_again() -> None:
    loading = Loading(BATCH, BATCH, seed=5, drop_last=True, epochs=None)
    for make in (Augmented, Counting):
        batches = EvaluationBatches(make(SIZE), loading)
        first = [micro.ids.tolist() for micro in batches]
        assert first == [list(range(8)), list(range(8, 16)), list(range(16, SIZE))]
        assert [micro.ids.tolist() for micro in batches] == first
        assert [micro.ids.tolist() for micro in EvaluationBatches(make(SIZE), loading, limit=2)] == first[:2]


@pytest.mark.parametrize(("count", "firsts"), [(1, [0]), (2, [0, 12]), (3, [0, 8, 16]), (6, [0, 4, 8, 12, 16, 20])])
def test_a_part_of_the_validation_is_spaced_evenly_and_always_the_same(count: int, firsts: list[int]) -> None:
    whole = EvaluationBatches(Augmented(22), Loading(4, 4, seed=5))
    part = whole.part(count)
    assert whole.count == 6 and part.count == count
    for _ in range(2):
        assert [int(micro.ids[0]) for micro in part] == firsts
    assert [micro.ids.tolist() for micro in part] == [m.ids.tolist() for m in whole if int(m.ids[0]) in firsts]


def test_a_part_of_a_stream_is_its_first_batches() -> None:
    whole = EvaluationBatches(Counting(22), Loading(4, 4, seed=5))
    assert whole.count is None and len(list(whole)) == 6
    assert len(list(whole.part(2))) == 2


def test_a_tensor_dataset_and_one_with_its_own_fetch_give_the_same_batches() -> None:
    x, y = torch.randn(SIZE, 3), torch.arange(SIZE)
    whole = TensorDataset(x, y)

    class OneByOne(Dataset[Any]):
        __len__ = whole.__len__
        __getitem__ = whole.__getitem__

    class Fetching(OneByOne):
        deterministic = True

        def fetch_batch(self, ids: Any) -> Any:
            return x[torch.from_numpy(ids)], y[torch.from_numpy(ids)]

    expected = take(OneByOne(), 5)
    assert_equal(take(whole, 5), expected)
    assert_equal(take(Fetching(), 5), expected)


def test_a_collate_function_of_ones_own_is_used_for_tensors_too() -> None:
    whole = TensorDataset(torch.arange(SIZE), torch.zeros(SIZE))
    found = unwrap(DataLoader(whole, batch_size=4, collate_fn=Drawing()))
    batches = take(found.dataset, 3, collate=found.collate)
    assert all(len(micro.data[1]) == 5 for batch in batches for micro in batch.micro)


def test_every_batch_and_every_sample_has_a_seed_of_its_own() -> None:
    seeds = {batch_seed(seed, epoch, start) for seed in range(8) for epoch in range(8) for start in range(-1, 8)}
    seeds |= {sample_seed(seed, epoch, index) for seed in range(8) for epoch in range(8) for index in range(8)}
    assert len(seeds) == 8 * 8 * (9 + 8)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert batch_seed(1, 2, 3) == batch_seed(1, 2, 3)


def test_to_device_reaches_into_every_nest() -> None:
    Point = namedtuple("Point", "x y")

    @dataclass
    class Opaque:
        tensor: Tensor

    opaque = Opaque(torch.ones(1))
    data = {"a": [torch.ones(2), (torch.zeros(1), "text")], "point": Point(torch.ones(1), None), "n": 3, "o": opaque}
    moved = to_device(data, torch.device("meta"))
    assert moved["a"][0].device.type == moved["a"][1][0].device.type == moved["point"].x.device.type == "meta"
    assert isinstance(moved["point"], Point)
    assert isinstance(moved["a"][1], tuple)
    assert (moved["a"][1][1], moved["point"].y, moved["n"], moved["o"]) == ("text", None, 3, opaque)
    assert data["a"][0].device.type == "cpu"  # type: ignore[index, union-attr]


def test_count_tokens() -> None:
    assert count_tokens((torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long))) == 10
    assert count_tokens({"x": torch.rand(2, 5), "ids": torch.zeros(3, 4, dtype=torch.int32)}) == 12
    assert count_tokens((torch.rand(2, 3), torch.zeros(2, dtype=torch.long))) == 0
    assert count_tokens("text") == 0
    assert count_tokens(({"labels": torch.zeros(2, 9).long(), "ids": torch.zeros(2, 5).long()}, None)) == 10
    assert count_tokens({"input_ids": torch.zeros(2, 4, 5).long(), "labels": torch.zeros(2).long()}) == 40


def test_targets_and_pixels_are_no_tokens() -> None:
    images, classes, several = torch.rand(2, 3, 4, 4), torch.zeros(2, 4, 4).long(), torch.zeros(2, 9).long()
    assert count_tokens((images, classes)) == 0
    assert count_tokens((images, several)) == 0
    assert count_tokens({"pixel_values": images, "labels": several}) == 0
    assert count_tokens({"image": images, "mask": classes}) == 0
    assert count_tokens((images.long(), several)) == 0


def test_unwrap_takes_a_loader_apart() -> None:
    dataset = Augmented()
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=4, shuffle=True, drop_last=True, collate_fn=Drawing())
    found = unwrap(loader)
    assert found.dataset is dataset
    assert (found.batch_size, found.shuffle, found.drop_last, found.workers) == (4, True, True, 0)
    assert isinstance(found.collate, Drawing)
    assert unwrap(DataLoader(dataset, batch_size=4)).shuffle is False
    stream = Counting(4)
    assert unwrap(DataLoader(stream, batch_size=2)).dataset is stream
    assert unwrap(dataset).batch_size is None
    assert unwrap([1, 2, 3]).dataset == [1, 2, 3]
    pair = unwrap((torch.ones(4, 2), torch.arange(4)))
    assert len(pair.dataset) == 4
    assert pair.dataset[3][1] == 3


def test_how_a_loader_reads_is_kept_and_what_is_not_used_is_told() -> None:
    settings: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 5, "timeout": 90, "worker_init_fn": print}
    loader: DataLoader[Any] = DataLoader(
        Augmented(),
        batch_size=4,
        multiprocessing_context="spawn",
        persistent_workers=True,
        generator=torch.Generator(),
        in_order=False,
        **settings,
    )
    found = unwrap(loader)
    assert (found.workers, found.prefetch, found.timeout_s, found.worker_init) == (2, 5, 90, print)
    assert found.start_method == "spawn"
    assert list(found.not_used) == ["in_order=False"]
    plain = unwrap(DataLoader(Augmented(), batch_size=4, pin_memory=True))
    assert (plain.prefetch, plain.timeout_s, plain.worker_init, plain.start_method) == (None,) * 4
    assert plain.not_used == {}


class Lengthless(Augmented):
    def __init__(self, length: Any) -> None:
        super().__init__()
        self.length = length

    def __len__(self) -> int:
        if isinstance(self.length, type):
            raise self.length("no index yet")
        return self.length


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Lengthless(0), "the dataset is empty"),
        ([], "the dataset is empty"),
        ((torch.ones(0, 3), torch.ones(0)), "the dataset is empty"),
        (TensorDataset(torch.ones(0, 3)), "the dataset is empty"),
        (Lengthless(NotImplementedError), r"len\(\) of the dataset raised NotImplementedError: no index yet"),
        (Lengthless(OSError), r"len\(\) of the dataset raised OSError: no index yet"),
        (Lengthless(-1), "raised ValueError"),
        (Lengthless(2.5), "raised TypeError"),
        (Lengthless(None), "raised TypeError"),
    ],
)
def test_a_dataset_that_is_empty_or_of_no_length_is_refused(data: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        unwrap(data)
    assert caught.value.remedy


def test_a_stream_need_not_know_its_length() -> None:
    class OfUnknownLength(Counting):
        def __len__(self) -> int:
            raise NotImplementedError

    for stream in (Counting(4), OfUnknownLength(4)):
        assert length_of(unwrap(stream).dataset) is None
    assert length_of(Augmented()) == SIZE


def loader_of(**settings: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), **settings)


OWN_ORDERS = {
    "weighted": lambda: loader_of(batch_size=4, sampler=WeightedRandomSampler([1.0] * SIZE, SIZE)),
    "replacement": lambda: loader_of(batch_size=4, sampler=RandomSampler(range(SIZE), replacement=True)),
    "fewer": lambda: loader_of(batch_size=4, sampler=RandomSampler(range(SIZE), num_samples=9), drop_last=True),
    "batches": lambda: loader_of(batch_sampler=[[0, 1, 2], [], [3], [4, 5, 6, 7], [8, 9]]),
}


def of_order(loader: DataLoader[Any], count: int, cursor: Cursor | None = None, **settings: Any) -> list[StepBatch]:
    found = unwrap(loader)
    size = found.batch_size or 1
    loading = Loading(size, sys.maxsize, seed=7, drop_last=bool(found.drop_last), order=found.order, **settings)
    return list(islice(StepBatches(found.dataset, loading, cursor=cursor), count))


@pytest.mark.parametrize("name", OWN_ORDERS)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.process)])
def test_an_order_of_ones_own_is_kept_and_resumed(name: str, workers: int) -> None:
    whole = of_order(OWN_ORDERS[name](), 7)
    seed_all(99)
    loader = OWN_ORDERS[name]()
    assert_equal(of_order(loader, 7, workers=workers), whole)
    assert_equal(of_order(OWN_ORDERS[name](), 5, whole[1].cursor, workers=workers), whole[2:])


def test_batches_of_a_sampler_are_steps_and_joined_by_accumulation() -> None:
    loader = OWN_ORDERS["batches"]()
    assert [batch.ids.tolist() for batch in of_order(loader, 4)] == [[0, 1, 2], [3], [4, 5, 6, 7], [8, 9]]
    joined = of_order(loader, 3, joined=2)
    assert [[micro.ids.tolist() for micro in batch.micro] for batch in joined] == [
        [[0, 1, 2]],
        [[3], [4, 5, 6, 7]],
        [[8, 9]],
    ]
    thinned = of_order(loader, 3, quarantine=frozenset([3, 5]))
    assert [batch.ids.tolist() for batch in thinned] == [[0, 1, 2], [4, 6, 7], [8, 9]]
    assert of_order(loader, 9, quarantine=frozenset(range(10))) == []


def test_a_batch_sampler_of_torch_is_taken_apart() -> None:
    found = unwrap(loader_of(batch_sampler=BatchSampler(SequentialSampler(range(SIZE)), 4, True)))
    assert (found.batch_size, found.drop_last, found.shuffle, found.order) == (4, True, False, None)


class Counted(torch.utils.data.Sampler[int]):
    """Its order follows from how often it was asked."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Any:
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += 1
        return iter(order)


def test_a_sampler_that_counts_its_epochs_is_asked_for_them_in_turn() -> None:
    whole = of_order(loader_of(batch_size=8, sampler=Counted()), 9)
    assert whole[0].ids.tolist() != whole[3].ids.tolist()
    assert_equal(of_order(loader_of(batch_size=8, sampler=Counted()), 2, whole[6].cursor), whole[7:])


class Unrepeatable(Counted):
    def __iter__(self) -> Any:
        return iter(np.random.default_rng().permutation(SIZE).tolist())


def test_an_order_that_comes_otherwise_is_told() -> None:
    order = unwrap(loader_of(batch_size=8, sampler=Unrepeatable())).order
    assert order is not None and not order.repeats
    cursor = of_order(loader_of(batch_size=8, sampler=Unrepeatable()), 2)[1].cursor
    stream = StepBatches(Augmented(), Loading(8, 8, seed=7, order=order), cursor=cursor)
    rest = list(islice(stream, 1))
    assert rest[0].cursor.position == SIZE and "they are NOT the same" in stream.resumed


def test_a_sampler_that_raises_is_told() -> None:
    with pytest.raises(UsageError, match="the sampler raised RuntimeError"):
        unwrap(loader_of(batch_size=8, sampler=WeightedRandomSampler([0.0] * SIZE, SIZE)))


def test_what_is_no_dataset_is_refused() -> None:
    with pytest.raises(UsageError, match=r"different lengths: \[3, 4\]"):
        unwrap((torch.ones(4, 2), torch.ones(3)))
    for thing in (7, nn.Linear(2, 2), Augmented, lambda index: index):
        with pytest.raises(UsageError, match="is not a dataset"):
            unwrap(thing)
    with pytest.raises(UsageError, match=r"a dict is a dataset if .*; 'ids' is a list"):
        unwrap({"mask": torch.ones(2, 3), "ids": [[1, 2, 3], [4, 5, 6]]})
