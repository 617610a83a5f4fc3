"""Files that can only be read from the beginning: every sample once an epoch, whoever reads which part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from trainwright.checkpoint.cursor import Cursor
from trainwright.data.fingerprint import fingerprint
from trainwright.data.loading import Loading, StepBatches
from trainwright.data.read_files import OpenFiles, files
from trainwright.data.sample_order import epoch_order
from trainwright.errors import DataError, StorageError, UsageError

SIZES = {"a": 5, "b": 0, "c": 11, "d": 3, "e": 18}
opened: list[str] = []


def numbers(path: str) -> Iterator[torch.Tensor]:
    opened.append(path)
    first = sum(SIZES[name] for name in SIZES if name < path)
    yield from torch.arange(first, first + SIZES[path])


def some(readers: int | None = 4) -> OpenFiles:
    return files([*SIZES], numbers, sizes=SIZES, readers=readers)


@pytest.mark.parametrize("readers", [1, 2, 5, 37])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_comes_once_in_an_epoch(readers: int, shuffle: bool) -> None:
    order = some(readers).files.order(seed=3, epoch=1, shuffle=shuffle)
    steps = [order[start : start + 7] for start in range(0, 37, 7)]
    assert [len(step) for step in steps] == [7, 7, 7, 7, 7, 2]
    assert sorted(np.concatenate(steps).tolist()) == list(range(37))
    if readers == 1:
        names = epoch_order(len(SIZES), seed=3, epoch=1, shuffle=shuffle)
        first = np.cumsum([0, *SIZES.values()])
        in_a_row = [first[name] + i for name in names for i in range([*SIZES.values()][name])]
        assert np.concatenate(steps).tolist() == in_a_row


def test_what_is_read_is_what_the_position_says() -> None:
    data = some()
    draw = np.random.default_rng(0)
    for position in draw.integers(0, 37, 60).tolist():
        assert int(data[position]) == position
    assert [int(each) for each in data.__getitems__([36, 4, 5, 6, 20])] == [36, 4, 5, 6, 20]
    with pytest.raises(IndexError):
        data[37]


def ids_of(data: OpenFiles, ranks: int, *, start: Cursor | None = None, steps: int = 12) -> list[list[int]]:
    """Return the sample ids of each step over all ranks, for more than two epochs."""
    found: list[list[int]] = [[] for _ in range(steps)]
    for rank in range(ranks):
        batches = iter(StepBatches(data, Loading(8, 4, seed=1, rank=rank, ranks=ranks), cursor=start))
        for step in found:
            batch = next(batches)
            assert all(torch.equal(micro.data, torch.from_numpy(micro.ids)) for micro in batch.micro if len(micro.ids))
            step.extend(batch.ids.tolist())
    return found


def test_a_step_has_the_same_samples_on_any_number_of_ranks_and_after_a_resume() -> None:
    alone = ids_of(some(), 1)
    for ranks in (2, 3, 4):
        assert ids_of(some(), ranks) == alone
    assert ids_of(some(), 2, start=Cursor(0, 24), steps=9) == alone[3:]
    first, second = (sorted(chain(*alone[start : start + 5])) for start in (0, 5))
    assert first == second == list(range(37)) and alone[:5] != alone[5:10]


def test_each_rank_opens_its_part_of_the_files_once_an_epoch() -> None:
    names = [f"{number:02}" for number in range(16)]

    def read(path: str) -> Iterator[int]:
        opened.append(path)
        yield from range(32)

    seen = []
    for rank in range(4):
        opened.clear()
        data = files(names, read, sizes=[32] * 16, readers=8)
        batches = iter(StepBatches(data, Loading(16, 4, rank=rank, ranks=4)))
        for _ in range(32):
            next(batches)
        seen.append(sorted(opened))
    assert sorted(chain(*seen)) == names and [len(each) for each in seen] == [4] * 4


def test_files_that_changed_are_not_trained_on() -> None:
    for size, error in ((10, "c has more than 10 samples"), (12, "c has 11 samples, and not 12")):
        data = files(["c"], numbers, sizes=[size])
        with pytest.raises(DataError, match=error):
            for batch in StepBatches(data, Loading(size, size, epochs=1)):
                assert batch.size == size


def test_numbers_are_counted_kept_and_checked(tmp_path: Path) -> None:
    kept = tmp_path / "sizes.json"
    assert files(["a", "c"], numbers, sizes=kept).files.sizes == (5, 11) == files(["a", "c"], numbers).files.sizes
    opened.clear()
    assert json.loads(kept.read_text()) == {"a": 5, "c": 11}
    assert len(files(["c", "a"], numbers, sizes=str(kept))) == 16 and not opened
    kept.write_text("[")
    with pytest.raises(StorageError, match="cannot be used for sizes"):
        files(["a"], numbers, sizes=kept)
    for paths, sizes, error in (
        (str(tmp_path / "*.none"), None, "no file matches"),
        (["a", "a"], None, "named twice"),
        (["a", "c"], [5], "sizes has 1 numbers, 5 in all, for 2 files"),
        (["b"], [0], "0 in all"),
        (["a", "c"], {"a": 5}, "sizes has no 'c'"),
    ):
        with pytest.raises(UsageError, match=error) as raised:
            files(paths, numbers, sizes=sizes)
        assert raised.value.remedy


def test_a_fingerprint_opens_no_file() -> None:
    opened.clear()
    one, other = fingerprint(some()), fingerprint(files(["a"], numbers, sizes=[5]))
    assert one.sha256 != other.sha256 and one.how.startswith("the names of 5 files") and not opened
