"""Whether two evaluations read the same samples, changed a little: each row is nearer to its own than to others."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from trainwright.recorder.plain_tensors import plain

ROWS, COLUMNS = 64, 256
"""That are compared."""
NEARER = 0.5
"""Times the distance to the next row, at the median: noise, a flip or another brightness leave a sample nearer."""


class ChangedRows:
    """Holds the first rows of the last two evaluations."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        self._passes: dict[Hashable, Tensor] = {}

    @torch.no_grad()
    def add(self, site: Hashable, tensors: Sequence[Tensor]) -> None:
        """The inputs of a pass without gradients, the first of its site since the last step."""
        x = next(
            (each for each in plain(tensors) if each.is_floating_point() and each.dim() > 1 and each.numel()), None
        )
        if x is not None:
            flat = x.detach()[:ROWS].flatten(1)
            part = flat[:, :: max(1, flat.shape[1] // COLUMNS)][:, :COLUMNS]
            self._passes[site] = part.to("cpu", torch.float64, copy=True)

    def close(self, site: Hashable) -> None:
        """``site`` is that of an evaluation; None where there was none."""
        if site in self._passes:
            self._held = [*self._held[-1:], self._passes[site]]
        self._passes = {}

    def are_of_same_samples(self) -> bool:
        """By their values at each place, or by all their values in order: a flip moves them to other places."""
        if len(self._held) < 2 or len({each.shape for each in self._held}) > 1 or len(self._held[0]) < 4:
            return False
        return _are_near(*self._held) or _are_near(*(each.sort(1).values for each in self._held))


def _are_near(one: Tensor, other: Tensor) -> bool:
    own, next_one = (one - other).norm(dim=1), (one - other.roll(1, 0)).norm(dim=1)
    return bool(own.median() < NEARER * next_one.median())
