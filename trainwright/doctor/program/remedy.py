"""Remedies that a replay can try: none, for the order of calls is the loop's, and a replay has its own."""

from __future__ import annotations

TRIALS: tuple[str, ...] = ()
"""Names in ``replay.trials``."""
