"""The share of a rank in each optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from trainwright.checkpoint.cursor import Ids


class Piece(NamedTuple):
    """The samples of one micro-batch of a rank, and where they begin among those of the step.

    A rank that has none left takes the first sample of the step: ``counted`` is False then, and it weighs nothing.
    """

    ids: Ids
    offset: int
    counted: bool = True


def pieces(ids: Ids, rank: int, ranks: int, micro_size: int) -> Iterator[Piece]:
    """Cuts the samples of a step, shape (n,), into even shares, and the share of ``rank`` into micro-batches.

    Every rank has as many micro-batches, since they may wait for each other in each. ``ids`` is not empty.
    """
    count = -(-len(ids) // (ranks * micro_size))
    shares = np.array_split(ids, ranks)
    offset = sum(map(len, shares[:rank]))
    for part in np.array_split(shares[rank], count):
        yield Piece(part, offset) if len(part) else Piece(ids[:1], 0, counted=False)
        offset += len(part)


def slices(ids: Ids, rank: int, ranks: int, micro_size: int) -> Iterator[Piece]:
    """Cuts the samples of a step into micro-batches that are the same on any number of ranks, and yields a rank's."""
    starts = range(0, len(ids), micro_size)
    mine = np.array_split(np.array(starts), ranks)[rank].tolist()
    for start in mine:
        yield Piece(ids[start : start + micro_size], start)
    if not mine:
        yield Piece(ids[:1], 0, counted=False)
