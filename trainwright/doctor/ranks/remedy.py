"""Remedies of the family that a replay can try: none, for a step of several ranks runs again only on all of them."""

from __future__ import annotations

TRIALS: tuple[str, ...] = ()
"""Names in ``replay.trials``."""
