"""Laws of the function that a model computes: of a sample alone, the same each time, in training and in evaluation."""

from __future__ import annotations

from trainwright.doctor.family import Family
from trainwright.doctor.function.check import LAWS
from trainwright.doctor.function.names import NAMES

FAMILY = Family("function", LAWS, NAMES)
