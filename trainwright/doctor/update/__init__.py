"""Laws of the update: what changed is what the rule says, of the gradients that were made, and nothing else writes."""

from __future__ import annotations

from trainwright.doctor.family import Family
from trainwright.doctor.update.check import LAWS
from trainwright.doctor.update.names import NAMES

FAMILY = Family("update", LAWS, NAMES)
