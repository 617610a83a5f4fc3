"""The doctor: findings from records alone, without torch; the same for a living run, a dead one and a foreign loop.

``FAMILIES`` lists its families of laws and of known causes, a folder each.
"""

from __future__ import annotations

from trainwright.doctor.averages import FAMILY as AVERAGES
from trainwright.doctor.data import FAMILY as DATA
from trainwright.doctor.family import Family
from trainwright.doctor.function import FAMILY as FUNCTION
from trainwright.doctor.gradient import FAMILY as GRADIENT
from trainwright.doctor.loss import FAMILY as LOSS
from trainwright.doctor.program import FAMILY as PROGRAM
from trainwright.doctor.update import FAMILY as UPDATE
from trainwright.doctor.vitals import FAMILY as VITALS

FAMILIES: tuple[Family, ...] = (
    AVERAGES,
    DATA,
    FUNCTION,
    GRADIENT,
    LOSS,
    PROGRAM,
    UPDATE,
    VITALS,
)
