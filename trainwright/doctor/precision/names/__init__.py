"""Known causes, which break the laws of the family; each is a pure function of a Case."""

from __future__ import annotations

from trainwright.doctor.finding import OldCheck
from trainwright.doctor.precision.names import formats, nonfinite

NAMES: tuple[OldCheck, ...] = (
    *formats.NAMES,
    *nonfinite.NAMES,
)
