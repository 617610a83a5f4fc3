"""Reads samples by position from files that can only be read sequentially, and computes their order.

An epoch concatenates all files in an order that is drawn from (seed, epoch), and divides the samples into equal parts.
Each part has a reader, and a step takes the next samples of every reader. The order does not depend on the number of
ranks, because the ranks share the readers.
"""

from __future__ import annotations

import glob
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from trainwright.checkpoint.rng import seed_of
from trainwright.data.generators import UserGenerators
from trainwright.data.sample_order import epoch_order
from trainwright.errors import DataError, StorageError, UsageError

Read: TypeAlias = Callable[[str], Iterable[Any]]
SIZES_REMEDY = (
    "give the number of samples of each file: sizes=[...], {name: number}, or the path of a JSON file to store them"
)


@dataclass(frozen=True)
class Files:
    """A set of files.

    ``read(path)`` yields the samples of a file, always in the same order. ``sizes`` are the numbers of samples.
    """

    paths: tuple[str, ...]
    read: Read
    sizes: tuple[int, ...]
    readers: int

    def order(self, *, seed: int, epoch: int, shuffle: bool) -> FilesOrder:
        """Return the order of the samples in an epoch. Positions count the samples of all ``paths`` in a row."""
        return FilesOrder(
            self.sizes, self.readers, epoch_order(len(self.sizes), seed=seed, epoch=epoch, shuffle=shuffle)
        )


class FilesOrder:
    """``order[start:stop]`` returns the positions (n,) of these samples of the epoch, sorted by reader."""

    def __init__(self, sizes: Sequence[int], readers: int, files: NDArray[np.int64]) -> None:
        counts = np.array(sizes, dtype=np.int64)
        first = np.cumsum(counts) - counts
        self._ends = np.cumsum(counts[files])  # in the concatenation of all files
        self._shift = first[files] - (self._ends - counts[files])
        each, more = divmod(int(counts.sum()), readers)
        lengths = each + (np.arange(readers) < more)
        self._starts = np.cumsum(lengths) - lengths
        self._size, self._readers = int(counts.sum()), readers

    def __getitem__(self, samples: slice) -> NDArray[np.int64]:
        number = np.arange(*samples.indices(self._size))
        rows = np.sort(self._starts[number % self._readers] + number // self._readers)
        found: NDArray[np.int64] = rows + self._shift[np.searchsorted(self._ends, rows, side="right")]
        return found


def count_samples(names: Sequence[str], read: Read, sizes: object) -> list[int]:
    """Return the numbers of samples from ``sizes``, or count them by reading the files if it is None."""
    if isinstance(sizes, str | Path):
        return _read_or_count(names, read, Path(sizes))
    if isinstance(sizes, Mapping):
        return _by_name(names, sizes)
    if sizes is not None:
        return [int(size) for size in sizes]  # type: ignore[attr-defined]
    return [sum(1 for _ in read(name)) for name in names]


def _by_name(names: Sequence[str], sizes: Mapping[str, int]) -> list[int]:
    if missing := [name for name in names if name not in sizes]:
        raise UsageError(f"sizes has no {missing[0]!r}", remedy=SIZES_REMEDY)
    return [int(sizes[name]) for name in names]


def _read_or_count(names: Sequence[str], read: Read, path: Path) -> list[int]:
    """Return the numbers in a JSON file. If it does not exist, count the samples and write it."""
    try:
        if path.exists():
            return _by_name(names, json.loads(path.read_text("utf-8")))
        counts = count_samples(names, read, None)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")  # several ranks may write the same file
        temporary.write_text(json.dumps(dict(zip(names, counts, strict=True)), indent=1), "utf-8")
        temporary.replace(path)
    except (OSError, ValueError, TypeError) as error:
        raise StorageError(f"{path} cannot be used for sizes: {error}", remedy="delete it, or name another") from None
    return counts


MAX_DEFAULT_READERS = 64
"""Maximum number of readers by default. Each reader holds a file open."""
_RECOUNT_REMEDY = "count its samples anew: sizes of tw.files, or delete the JSON file that has them"


def files(
    paths: str | Sequence[str | Path],
    read: Read,
    *,
    sizes: Sequence[int] | Mapping[str, int] | str | Path | None = None,
    readers: int | None = None,
) -> OpenFiles:
    """Return a dataset of samples in files that can only be read sequentially, such as ``IterableDataset`` reads.

    On several ranks each opens its part of the files.

    Args:
        paths: Names that ``read`` accepts, or a pattern of local files (``"shards/*.jsonl"``).
        read: ``read(path)`` yields the samples of one file, the same each time.
        sizes: Number of samples of each file, as a list, by name, or the path of a JSON file, which is created if
            missing; None: read every file once to count.
        readers: Number of places at which the files are read in parallel; by default the number of files, at most 64,
            rounded down to a power of two.

    Raises:
        UsageError: Nothing matches, or the numbers are invalid.
        StorageError: The JSON file cannot be used.
    """
    if isinstance(paths, str):
        names = sorted(glob.glob(paths))  # noqa: PTH207  it may be absolute
    else:
        names = [os.fspath(path) for path in paths]
    if not names:
        raise UsageError(f"no file matches {paths!r}", remedy="give a pattern of files that exist, or their names")
    if len(set(names)) < len(names):
        raise UsageError("a file is named twice, so its samples would come twice in an epoch", remedy="name each once")
    counts = count_samples(names, read, sizes)
    if len(counts) != len(names) or min(counts) < 0 or not sum(counts):
        raise UsageError(
            f"sizes has {len(counts)} numbers, {sum(counts)} in all, for {len(names)} files", remedy=SIZES_REMEDY
        )
    if readers is None:
        readers = 1 << (min(len(names), MAX_DEFAULT_READERS).bit_length() - 1)
    if not 1 <= readers <= sum(counts):
        raise UsageError(f"readers={readers} for {sum(counts)} samples", remedy="leave it out, or give 1 or more")
    return OpenFiles(Files(tuple(names), read, tuple(counts), readers))


class OpenFiles(Dataset[Any]):
    """Keeps recently read files open: one for each reader and one more.

    A sample ahead of the position of an open file is reached by reading on. For any other sample, the file is opened
    again, and the samples before it are read and dropped. Draws of ``read`` come from generators that depend on file
    and epoch only.
    """

    deterministic = True

    def __init__(self, files: Files) -> None:
        self.files, self.epoch = files, 0
        self._ends = np.cumsum(files.sizes)
        self._open: list[_OpenFile] = []
        self._pid = os.getpid()
        self._inherited: list[object] = []

    def __len__(self) -> int:
        return int(self._ends[-1])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": [], "_inherited": []}

    def __getitem__(self, position: int) -> Any:
        if not 0 <= position < len(self):
            raise IndexError(f"there are {len(self)} samples, and {position} is none of them")
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """Return the samples at these positions, in their order."""
        if self._pid != os.getpid():  # a forked process shares the file positions of its parent
            self._inherited += self._open
            self._open, self._pid = [], os.getpid()
        return [
            sample for number, offset, count in self._runs(positions) for sample in self._read(number, offset, count)
        ]

    def _runs(self, positions: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield (file, first sample in it, number of samples) for runs of consecutive positions."""
        at = np.asarray(positions, dtype=np.int64)
        numbers = np.searchsorted(self._ends, at, side="right")
        breaks = np.flatnonzero((np.diff(at) != 1) | (np.diff(numbers) != 0)) + 1
        for run in np.split(np.arange(len(at)), breaks):
            number = int(numbers[run[0]])
            yield number, int(at[run[0]] - self._ends[number] + self.files.sizes[number]), len(run)

    def _read(self, number: int, offset: int, count: int) -> list[Any]:
        behind = [
            each for each in self._open if (each.number, each.epoch) == (number, self.epoch) and each.position <= offset
        ]
        found = max(behind, key=lambda each: each.position, default=None)
        if found is None:
            found = _OpenFile(self.files, number, self.epoch)
        else:
            self._open.remove(found)
        samples = found.take(offset, count)
        if found.position < self.files.sizes[number]:
            self._open = [*self._open[-self.files.readers :], found]
        return samples


class _OpenFile:
    """A file that has been read up to a position."""

    def __init__(self, files: Files, number: int, epoch: int) -> None:
        self.number = number
        self.epoch = epoch
        self.position = 0
        self._path, self._size = files.paths[number], files.sizes[number]
        self._generators = UserGenerators(seed_of(f"{epoch}:{number}:file"))
        with self._generators:
            self._samples = iter(files.read(self._path))

    def take(self, offset: int, count: int) -> list[Any]:
        """Return samples from an offset on, which is not before the position.

        Raises DataError if the file has another number of samples than counted.
        """
        with self._generators:
            for _ in islice(self._samples, offset - self.position):
                self.position += 1
            samples = list(islice(self._samples, count)) if self.position == offset else []
            self.position += len(samples)
            if len(samples) < count:
                raise DataError(
                    f"{self._path} has {self.position} samples, and not {self._size}", remedy=_RECOUNT_REMEDY
                )
            if self.position == self._size and next(self._samples, self) is not self:
                raise DataError(f"{self._path} has more than {self._size} samples", remedy=_RECOUNT_REMEDY)
        return samples
