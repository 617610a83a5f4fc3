"""Laws of the program: its objects belong together, its calls come in order, and what is written is read."""

from __future__ import annotations

from trainwright.doctor.family import Family
from trainwright.doctor.program.check import LAWS
from trainwright.doctor.program.names import NAMES

FAMILY = Family("program", LAWS, NAMES)
