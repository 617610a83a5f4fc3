"""Vital signs of a run: what must move, moves; what must vary, varies; what must stay, stays."""

from __future__ import annotations

from trainwright.doctor.family import Family
from trainwright.doctor.vitals.check import LAWS
from trainwright.doctor.vitals.names import NAMES

FAMILY = Family("vitals", LAWS, NAMES)
