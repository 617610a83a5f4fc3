"""``ladder``: from a float32 baseline to a fast run, one change at a time."""

from __future__ import annotations

from trainwright.commands.ladder.climb import ladder as ladder

__all__ = ["ladder"]
