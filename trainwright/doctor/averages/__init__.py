"""Laws of averages: what follows an average of the weights is one, in all of its parts."""

from __future__ import annotations

from trainwright.doctor.averages.check import LAWS, NAMES
from trainwright.doctor.family import Family

FAMILY = Family("averages", LAWS, NAMES)
