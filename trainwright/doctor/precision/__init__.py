"""Laws of precision: in float64 a step gives the same, as far as its dtype allows, and batches keep their digits."""

from __future__ import annotations

from trainwright.doctor.family import Family
from trainwright.doctor.precision.check import LAWS
from trainwright.doctor.precision.names import NAMES

FAMILY = Family("precision", LAWS, NAMES)
