"""Detects whether gradients from before a step are part of its update, or the loop has replaced them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import repeat
from typing import TypeAlias

import torch
from torch import Tensor

from trainwright.recorder.ranks import local_part

MULTIPLE = 0.01
"""Maximum relative deviation of gradients that count as a multiple of what the backward passes left."""

Versions: TypeAlias = tuple[list[int], list[int]]
_GRAD, _VERSION = operator.attrgetter("grad"), operator.attrgetter("_version")


def versions_of_gradients(parameters: Sequence[Tensor]) -> Versions:
    """Returns identity and version of each gradient. They change if it is replaced or written to."""
    grads = list(map(_GRAD, parameters))
    try:
        return list(map(id, grads)), list(map(_VERSION, grads))
    except AttributeError:  # None has no version
        return list(map(id, grads)), [-1 if grad is None else grad._version for grad in grads]


def num_gradients(parameters: Sequence[Tensor]) -> int:
    """Returns the number of parameters with a gradient. Takes 0.05 us for each."""
    return sum(map(operator.is_not, map(_GRAD, parameters), repeat(None)))


class CarriedGradients:
    """Tracks gradients that no zero_grad() drops.

    A loop may write gradients by hand before each update: from a 16-bit copy, or from a second loss. Then the gradients
    at the update are not a multiple of what the backward passes left.
    """

    def __init__(self) -> None:
        self._used: dict[int, Versions] = {}  # at the last update without a backward pass, by optimizer
        self.left: dict[int, Tensor] = {}
        """Copies of the gradients after a backward pass, by ``id`` of the parameter. Empty: nothing is compared."""

    def on_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Copies the gradients that a backward pass has left."""
        self.left = {id(p): p.grad.detach().clone() for p in parameters if p.grad is not None}

    def on_zero_grad(self, index: int | None) -> None:
        """Called when the gradients of the optimizer ``index``, or of a model (None), are dropped."""
        if index is None:
            self._used.clear()
        else:
            self._used.pop(index, None)

    def close(self) -> None:
        self.left = {}

    def is_recomputed(self, index: int, parameters: Sequence[Tensor], has_backward: bool) -> bool:
        """Returns True if the gradients of a stepping optimizer were not added to those of an earlier step."""
        if not has_backward:  # compare with the last update of this optimizer
            now, before = versions_of_gradients(parameters), self._used.get(index)
            self._used[index] = now
            return before is None or not _has_grown(before, now)
        pairs = [(p.grad, self.left[id(p)]) for p in parameters if p.grad is not None and id(p) in self.left]
        return bool(pairs) and not any(grad.is_sparse for grad, _ in pairs) and not _is_multiple(pairs)


def _has_grown(before: Versions, now: Versions) -> bool:
    """Returns True if a gradient is the same tensor and was written to."""
    return any(one == other and old < new for one, other, old, new in zip(before[0], now[0], before[1], now[1]))


@torch.no_grad()
def _is_multiple(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Returns True if the gradients equal what a backward pass left, times one factor. Waits for a GPU."""
    inner = sum(float((local_part(grad).float() * local_part(left).float()).sum()) for grad, left in pairs)
    size, whole = (sum(float(local_part(pair[n]).float().norm()) ** 2 for pair in pairs) for n in (0, 1))
    return size * whole <= 0.0 or size - inner**2 / whole <= MULTIPLE**2 * size
