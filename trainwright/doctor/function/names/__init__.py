"""Known causes, which break the laws of the family; each is a pure function of a Case."""

from __future__ import annotations

from trainwright.doctor.finding import OldCheck
from trainwright.doctor.function.names import layers, structure

NAMES: tuple[OldCheck, ...] = (
    *layers.NAMES,
    *structure.NAMES,
)
