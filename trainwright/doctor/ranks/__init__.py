"""Laws over the ranks of a run: what is the same on all of them, what is not, and who arrives when."""

from __future__ import annotations

from trainwright.doctor.family import Family
from trainwright.doctor.ranks.check import LAWS, NAMES

FAMILY = Family("ranks", LAWS, NAMES)
