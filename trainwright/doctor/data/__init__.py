"""Laws of the data: which samples are drawn, which are evaluated, and whether their values are in a sensible form."""

from __future__ import annotations

from trainwright.doctor.data.check import LAWS
from trainwright.doctor.data.names import NAMES
from trainwright.doctor.family import Family

FAMILY = Family("data", LAWS, NAMES)
