"""Laws of the gradient: the optimizer is given the derivative of the loss, of every weight it depends on."""

from __future__ import annotations

from trainwright.doctor.family import Family
from trainwright.doctor.gradient.check import LAWS
from trainwright.doctor.gradient.names import NAMES

FAMILY = Family("gradient", LAWS, NAMES)
