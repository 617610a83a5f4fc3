"""Measurements of the function that the models compute. Deviations are in standard deviations of the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Deviation:
    """How far outputs changed that must not change; more than ``limit`` is more than rounding.

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
    """The forward pass of one step in eval mode, replayed with one thing changed. None: could not be measured.

    ``written``: buffers that a pass writes to. ``place``: samples in another order. ``neighbours``: another sample in
    the batch; ``related`` says why samples may depend on each other, and ``is_batch``: a loader says what a sample is.
    ``padding``: a row without its padding, ``pad`` says what declares it.
    """

    experiment: ClassVar[str] = "function"
    size: int = 0
    written: tuple[str, ...] = ()
    neighbours: Deviation | None = None
    related: str = ""
    is_batch: bool = False
    place: Deviation | None = None
    padding: Deviation | None = None
    pad: str = ""


@dataclass(frozen=True)
class InputsFacts:
    """Of the first ``tensors`` inputs that vary from sample to sample those without any effect, by place."""

    experiment: ClassVar[str] = "unused_inputs"
    tensors: int
    unused: tuple[int, ...] = ()
