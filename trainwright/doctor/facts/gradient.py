"""Measurements of gradients: custom backward passes, and how a step accumulates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainwright.runs.records import Values


@dataclass(frozen=True)
class AccumulationFacts:
    """A step of several backward passes, each through its own batch.

    Attributes:
        is_plain: Each has a batch of its own and goes through the same functions, and the loop uses no gradient by
            hand in between.
        weights: By micro-batch, the derivative of what backward was called on with respect to its mean loss.
        counts: By micro-batch, the elements that this mean is over.
        discarded: Backward passes whose gradients are dropped before the update.
        norm_then, norm_now: Norm of the gradients at the live update and at the replayed one.
    """

    experiment: ClassVar[str] = "accumulation"
    backwards: int
    is_plain: bool = False
    weights: tuple[float | None, ...] = ()
    counts: tuple[float | None, ...] = ()
    discarded: int = 0
    norm_then: float | None = None
    norm_now: float | None = None

    @property
    def is_as_recorded(self) -> bool:
        """Whether nothing else has scaled the gradients."""
        then, now = self.norm_then, self.norm_now
        return not then or not now or abs(then - now) < 0.05 * now


@dataclass(frozen=True)
class CustomFunctionsFacts:
    """By custom autograd Function, its backward pass beside a difference quotient (see the instrument for the keys)."""

    experiment: ClassVar[str] = "custom_functions"
    functions: tuple[Values, ...] = ()
