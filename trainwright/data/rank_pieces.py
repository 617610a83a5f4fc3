"""Divides the samples of each optimizer step among ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from trainwright.checkpoint.cursor import Ids


class Piece(NamedTuple):
    """The samples of one micro-batch of a rank, and their offset in the step.

    A rank without samples gets the first sample of the step, with ``counted`` False: weight 0.
    """

    ids: Ids
    offset: int
    counted: bool = True


def pieces(ids: Ids, rank: int, ranks: int, micro_size: int) -> Iterator[Piece]:
    """Divide the samples of a step, shape (n,), evenly, and cut the part of ``rank`` into micro-batches.

    All ranks have equally many micro-batches, because they may wait for each other in each. ``ids`` is not empty.
    """
    count = -(-len(ids) // (ranks * micro_size))
    shares = np.array_split(ids, ranks)
    offset = sum(map(len, shares[:rank]))
    for part in np.array_split(shares[rank], count):
        yield Piece(part, offset) if len(part) else Piece(ids[:1], 0, counted=False)
        offset += len(part)


def slices(ids: Ids, rank: int, ranks: int, micro_size: int) -> Iterator[Piece]:
    """Cut a step into micro-batches that are the same on any number of ranks, and yield those of ``rank``."""
    starts = range(0, len(ids), micro_size)
    mine = np.array_split(np.array(starts), ranks)[rank].tolist()
    for start in mine:
        yield Piece(ids[start : start + micro_size], start)
    if not mine:
        yield Piece(ids[:1], 0, counted=False)
