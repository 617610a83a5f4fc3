"""Measurements of gradients: custom backward passes and gradient accumulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class AccumulationFacts:
    """A step with several backward passes."""

    experiment: ClassVar[str] = "accumulation"
    backwards: int  # Number of backward passes
    # Each pass has a batch of its own and uses the same functions, and the loop does not touch gradients between the
    # passes
    is_plain: bool = False
    # For each micro-batch, the derivative of the backward root with respect to the mean loss
    weights: tuple[float | None, ...] = ()
    counts: tuple[float | None, ...] = ()  # For each micro-batch, the number of elements in this mean
    discarded: int = 0  # Backward passes whose gradients are dropped before the update
    norm_then: float | None = None  # Norm of the gradients at the recorded update
    norm_now: float | None = None  # Norm of the gradients at the replayed update

    @property
    def is_as_recorded(self) -> bool:
        """Returns True if the replayed gradients have the recorded norm, so that nothing else scaled them."""
        then, now = self.norm_then, self.norm_now
        return not then or not now or abs(then - now) < 0.05 * now
