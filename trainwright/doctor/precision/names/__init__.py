"""Known causes, which break the laws of the family; each is a pure function of a Case."""

from __future__ import annotations

from trainwright.doctor.finding import Check
from trainwright.doctor.precision.names import formats, nonfinite

NAMES: tuple[Check, ...] = (
    *formats.NAMES,
    *nonfinite.NAMES,
)
