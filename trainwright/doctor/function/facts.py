"""What was measured of the function that the models compute. Deviations are in standard deviations of the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Deviation:
    """How far outputs changed that must not change. More than ``limit`` is more than rounding.

    ``module`` is the first one whose output changed though its input had not; None where that is not known.
    """

    amount: float
    limit: float
    module: str | None = None

    @property
    def is_real(self) -> bool:
        return self.amount > self.limit


@dataclass(frozen=True)
class FunctionFacts:
    """Of one step, its forward pass in eval mode run again with one thing changed. None: could not be measured.

    ``noise``: other random numbers. ``carried``: a second call after the first. ``written``: buffers that a pass
    writes to. ``neighbours``: another sample in the batch, ``related`` says why samples may depend on each other.
    ``alone``: two samples without the others. ``padding``: a row without its padding, ``pad`` says what declares it.
    ``future``: later positions, where the target is the next one.
    """

    experiment: ClassVar[str] = "function"
    size: int = 0
    noise: Deviation | None = None
    carried: Deviation | None = None
    written: tuple[str, ...] = ()
    neighbours: Deviation | None = None
    related: str = ""
    alone: Deviation | None = None
    padding: Deviation | None = None
    pad: str = ""
    future: Deviation | None = None


@dataclass(frozen=True)
class InputsFacts:
    """Of the first ``tensors`` inputs that vary from sample to sample those without an effect on any output, by place.

    ``columns`` of the first one that vary; ``idle_columns`` are those of them without an effect.
    """

    experiment: ClassVar[str] = "idle_inputs"
    tensors: int
    columns: int = 0
    idle: tuple[int, ...] = ()
    idle_columns: tuple[int, ...] = ()


@dataclass(frozen=True)
class GapFacts:
    """The loss of one batch, with the same weights, in train mode and in eval mode.

    ``module`` is the one that, put into train mode alone, takes most of the difference away; ``without`` is the loss
    then.
    """

    experiment: ClassVar[str] = "evaluated"
    train: float
    eval: float
    module: str | None = None
    without: float | None = None


@dataclass(frozen=True)
class TiesFacts:
    """Weights that two modules shared when the watch began: ``broken`` do so no longer, as (one, other).

    ``split`` are two parameters over the same memory: each has a gradient and moments of its own.
    """

    experiment: ClassVar[str] = "ties"
    tied: int
    broken: tuple[tuple[str, ...], ...] = ()
    split: tuple[tuple[str, ...], ...] = ()
