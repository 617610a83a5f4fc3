"""The doctor: findings from records alone, without torch; the same for a living run, a dead one and a foreign loop.

``FAMILIES`` lists its families of laws and of known causes, a folder each.
"""

from __future__ import annotations

from trainwright.doctor.family import Family

FAMILIES: tuple[Family, ...] = ()
