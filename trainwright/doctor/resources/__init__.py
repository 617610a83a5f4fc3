"""Laws of the resources: nothing grows from step to step, and time goes into the work."""

from __future__ import annotations

from trainwright.doctor.family import Family
from trainwright.doctor.resources.check import LAWS, NAMES

FAMILY = Family("resources", LAWS, NAMES)
