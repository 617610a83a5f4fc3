"""Remedies of the family that a replay tries before they are offered. Importing it registers them."""

from __future__ import annotations

from trainwright.doctor.program.remedy import modes, schedules

__all__ = ["modes", "schedules"]
