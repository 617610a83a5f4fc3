"""Remedies of the family that a replay can try: those of ``replay.trials`` for the optimizer."""

from __future__ import annotations

TRIALS: tuple[str, ...] = ("other_lr",)
"""Names in ``replay.trials``."""
