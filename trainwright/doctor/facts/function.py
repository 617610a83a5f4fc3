"""Measurements of the function that the models compute. Deviations have the unit: standard deviations of the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Deviation:
    """Change of outputs that should stay the same."""

    amount: float  # The change
    limit: float  # The largest change that rounding explains
    module: str | None = None  # Path of the first module whose output changed with unchanged input; None if unknown
    line: str | None = None  # Line in it that calls the first function whose result changed; None if unknown

    @property
    def is_real(self) -> bool:
        return self.amount > self.limit


@dataclass(frozen=True)
class FunctionFacts:
    """The forward pass of one step in eval mode, replayed with one change at a time."""

    experiment: ClassVar[str] = "function"
    written: tuple[str, ...] = ()  # Buffers that a forward pass writes to
    neighbours: Deviation | None = None  # Deviation if other samples of the batch change; None if not measured
    related: str = ""  # Reason why samples may depend on each other; "" without one
    is_batch: bool = False  # A loader confirms that the first dimension counts samples
    place: Deviation | None = None  # Deviation if the samples are in another order; None if not measured
    padding: Deviation | None = None  # Deviation if a row is given without its padding; None if not measured
    pad: str = ""  # The declaration that identifies padding
