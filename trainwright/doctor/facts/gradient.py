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


@dataclass(frozen=True)
class FunctionTest:
    """The backward pass of a custom autograd Function compared with a difference quotient."""

    function: str  # Its name
    module: str  # Path of the calling module
    error: float | None = None  # The largest relative error of a gradient; None if it was not tested
    factor: float = 1.0  # The best-fitting factor of that gradient
    unsteady: float = 0.0  # Relative difference of two difference quotients
    identity: bool = False  # The forward pass returns an argument
    constant: bool = False  # The outputs do not depend on an argument with a gradient
    own_way: bool = False  # The backward pass reads an argument that the outputs do not depend on
    straight: bool = False  # The gradients are passed on unchanged
    moving: float = 1.0  # The largest error at elements that move the output at their position


@dataclass(frozen=True)
class CustomFunctionsFacts:
    """The custom autograd Functions of a step."""

    experiment: ClassVar[str] = "custom_functions"
    functions: tuple[FunctionTest, ...] = ()
