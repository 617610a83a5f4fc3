"""Computes the order of samples in files that can only be read sequentially, from the number of samples of each file.

An epoch concatenates all files in an order that is drawn from (seed, epoch), and divides the samples into equal parts.
Each part has a reader, and a step takes the next samples of every reader. The order does not depend on the number of
ranks, because the ranks share the readers.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainwright.data.sample_order import epoch_order
from trainwright.errors import StorageError, UsageError

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
