"""Laws of going on: what continues a training is the whole of what was saved, each part in its place."""

from __future__ import annotations

from trainwright.doctor.family import Family
from trainwright.doctor.resume.laws import LAWS

FAMILY = Family("resume", LAWS, ())
