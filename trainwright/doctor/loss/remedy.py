"""Remedies that a replay can try: those of the names in ``replay.trials``, for these laws have none of their own."""

from __future__ import annotations

TRIALS: tuple[str, ...] = ()
"""Names in ``replay.trials``."""
