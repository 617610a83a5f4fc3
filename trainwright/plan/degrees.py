"""Degrees of parallelism: how many parts a layout has along each axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""From the outside in: consecutive ranks differ in the last axis first."""


@dataclass(frozen=True)
class Degrees:
    """The number of parts along each axis: copies, weight shards, tensor parts, pipeline stages, sequence parts."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The degrees in the order of ``AXES``."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def ranks(self) -> int:
        return math.prod(self.shape)

    @property
    def data(self) -> int:
        """The number of parts into which the samples of a step are divided."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        named = [f"{axis}: {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return f"{{{', '.join(named or ['replicate: 1'])}}}"


ONE_RANK = Degrees()


def place_of(degrees: Degrees, rank: int) -> Degrees:
    """Return the position of ``rank`` on each axis, from 0."""
    place = {}
    for axis in reversed(AXES):
        rank, place[axis] = divmod(rank, getattr(degrees, axis))
    return Degrees(**place)


def nearest(wanted: Degrees, ranks: int, count: int = 2) -> list[Degrees]:
    """Return the nearest layouts with ``ranks`` ranks, on ``replicate`` and the axes that ``wanted`` divides."""
    axes = [axis for axis in AXES if axis == "replicate" or getattr(wanted, axis) > 1]
    layouts = [Degrees(**dict(zip(axes, sizes, strict=True))) for sizes in _factors(ranks, len(axes))]
    return sorted(layouts, key=lambda each: _distance(each, wanted))[:count]


def _distance(one: Degrees, other: Degrees) -> float:
    """Return the distance of two layouts in factors of two. The number of copies counts least."""
    apart = {axis: abs(math.log2(getattr(one, axis) / getattr(other, axis))) for axis in AXES}
    return sum(apart.values()) - 0.9 * apart["replicate"]


def _factors(product: int, count: int) -> Iterator[Sequence[int]]:
    """Yield all ordered ways to write ``product`` as ``count`` factors."""
    if count == 1:
        yield (product,)
        return
    for first in range(1, product + 1):
        if product % first == 0:
            for rest in _factors(product // first, count - 1):
                yield (first, *rest)
