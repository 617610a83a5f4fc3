"""Whether gradients that were there before a step are in its update, or the loop has put others in their place."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from trainwright.recorder.ranks import own_part

MULTIPLE = 0.01
"""Of a gradient: what may be left beside a multiple of the one that it was made of by hand."""

Versions: TypeAlias = tuple[list[int], list[int]]
_GRAD = operator.attrgetter("grad")


def versions_of_gradients(parameters: Sequence[Tensor]) -> Versions:
    """Identity and version of each gradient: they change when it is replaced or written to."""
    grads = list(map(_GRAD, parameters))
    return list(map(id, grads)), [-1 if grad is None else grad._version for grad in grads]


class CarriedGradients:
    """Follows gradients that no zero_grad() drops.

    A loop may write them anew by hand before each update: from those of a copy in 16 bits, or from a second loss. Then
    those at the update are no multiple of what the backward passes left.
    """

    def __init__(self) -> None:
        self._used: dict[int, Versions] = {}  # of each optimizer that steps without a backward pass before it
        self.left: dict[int, Tensor] = {}
        """Copies of the gradients, by parameter. Empty: after a backward pass there is nothing to compare."""

    def on_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Copies what a backward pass has left."""
        self.left = {id(p): p.grad.detach().clone() for p in parameters if p.grad is not None}

    def on_zero_grad(self, index: int | None) -> None:
        """The gradients of an optimizer are dropped; None: those of a model."""
        if index is None:
            self._used.clear()
        else:
            self._used.pop(index, None)

    def close(self) -> None:
        self.left = {}

    def is_made_anew(self, index: int, parameters: Sequence[Tensor], has_backward: bool) -> bool:
        """Whether the optimizer that steps finds gradients that have not been added to those of a step before."""
        if not has_backward:  # its turn comes behind the step of another: what was added since its own?
            now, before = versions_of_gradients(parameters), self._used.get(index)
            self._used[index] = now
            return before is None or not _has_grown(before, now)
        pairs = [(p.grad, self.left[id(p)]) for p in parameters if p.grad is not None and id(p) in self.left]
        return bool(pairs) and not any(grad.is_sparse for grad, _ in pairs) and not _is_multiple(pairs)


def _has_grown(before: Versions, now: Versions) -> bool:
    """Whether a gradient is the same tensor, and was written to."""
    return any(one == other and old < new for one, other, old, new in zip(before[0], now[0], before[1], now[1]))


@torch.no_grad()
def _is_multiple(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether gradients are what was left times one factor. On a GPU this waits for the device."""
    inner = sum(float((own_part(grad).float() * own_part(left).float()).sum()) for grad, left in pairs)
    size, whole = (sum(float(own_part(pair[n]).float().norm()) ** 2 for pair in pairs) for n in (0, 1))
    return size * whole <= 0.0 or size - inner**2 / whole <= MULTIPLE**2 * size
