"""Remedies of the family that a replay can try: those of ``replay.trials`` for the data."""

from __future__ import annotations

TRIALS: tuple[str, ...] = ("standardised_inputs",)
"""Names in ``replay.trials``."""
