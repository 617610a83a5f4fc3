"""Known causes, which break the laws of the family; each is a pure function of a Case."""

from __future__ import annotations

from trainwright.doctor.finding import OldCheck
from trainwright.doctor.program.names import contract, modes, schedules, unseen

NAMES: tuple[OldCheck, ...] = (
    *contract.NAMES,
    *modes.NAMES,
    *schedules.NAMES,
    *unseen.NAMES,
)
