"""Laws of the loss: where it starts, what it compares, what its least value is, and how it depends on the batch."""

from __future__ import annotations

from trainwright.doctor.family import Family
from trainwright.doctor.loss.check import LAWS
from trainwright.doctor.loss.names import NAMES

FAMILY = Family("loss", LAWS, NAMES)
