"""Remedies that a replay tries before they are offered: a function each."""

from __future__ import annotations

from trainwright.replay.trials import RegisteredTrial

TRIALS: dict[str, RegisteredTrial] = {}
"""By the name that findings give."""
