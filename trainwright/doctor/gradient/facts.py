"""What is measured of gradients: slopes of a loss along directions in the weights, by autograd and by differences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Slopes:
    """The slope of a loss when these tensors move together: of its gradient, and of a difference quotient.

    ``error`` is how far two step sizes put the quotient apart. ``coarse`` is the quotient of a step so long that it
    sees through rounding: where it is not that of short steps, the loss is made of stairs.
    """

    names: tuple[str, ...]
    of_gradient: float
    of_loss: float
    error: float
    coarse: float

    @property
    def factor(self) -> float:
        """The slope of the loss over that of the gradient."""
        return self.of_loss / self.of_gradient if self.of_gradient else float("inf")


@dataclass(frozen=True)
class DerivativeFacts:
    """One step in float64 (``dtype``: float32 where the model refuses that), each kind of backward pass by itself.

    ``whole`` are the slopes along all tensors that have a gradient, ``deviating`` those of groups where both differ.
    ``unreached`` are tensors that the optimizer holds and no backward pass gives a gradient, though the loss depends on
    them; ``unreached_share`` is theirs of the trained elements. ``cuts`` are the functions, with the module that calls
    them, that make a value without a graph of one that has one; with them undone the deviation is
    ``left_without_cuts`` of what it was (None: not tried). ``hooks`` and ``functions`` are what else the user has put
    into the backward pass: hooks on tensors, autograd Functions. ``estimators`` are functions of torch that pass a
    gradient where they have no slope; they are looked for where nothing else explains that gradients deviate.
    """

    experiment: ClassVar[str] = "derivative"
    dtype: str
    backwards: int
    tensors: int
    whole: tuple[Slopes, ...]
    deviating: tuple[Slopes, ...]
    unreached: tuple[Slopes, ...]
    unreached_share: float
    cuts: tuple[tuple[str, ...], ...]
    left_without_cuts: float | None
    hooks: int
    functions: tuple[str, ...]
    estimators: tuple[str, ...] = ()
