"""The doctor: findings from records alone, without torch; the same for a living run, a dead one and a foreign loop.

``FAMILIES`` lists its families of laws and of known causes, a folder each.
"""

from __future__ import annotations

from trainwright.doctor.family import Family
from trainwright.doctor.precision import FAMILY as PRECISION
from trainwright.doctor.ranks import FAMILY as RANKS
from trainwright.doctor.resources import FAMILY as RESOURCES
from trainwright.doctor.resume import FAMILY as RESUME

FAMILIES: tuple[Family, ...] = (
    PRECISION,
    RANKS,
    RESOURCES,
    RESUME,
)
