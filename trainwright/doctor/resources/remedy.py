"""Remedies of the family that a replay can try: none, for a replay holds what it holds for itself."""

from __future__ import annotations

TRIALS: tuple[str, ...] = ()
"""Names in ``replay.trials``."""
