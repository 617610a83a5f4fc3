"""Laws of the resources: nothing grows from step to step, and time goes into the work."""

from __future__ import annotations

from trainwright.doctor.family import Family
from trainwright.doctor.resources.check import LAWS
from trainwright.doctor.resources.names import NAMES

FAMILY = Family("resources", LAWS, NAMES)
