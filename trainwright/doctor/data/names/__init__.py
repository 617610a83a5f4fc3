"""Known causes, which break the laws of the family; each is a pure function of a Case."""

from __future__ import annotations

from trainwright.doctor.data.names import inputs, labels, loaders
from trainwright.doctor.finding import OldCheck

NAMES: tuple[OldCheck, ...] = (
    *inputs.NAMES,
    *labels.NAMES,
    *loaders.NAMES,
)
