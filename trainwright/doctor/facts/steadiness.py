"""Measurements of what only the loop itself shows: random states that come again, data that are written to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class SteadinessFacts:
    """Over ``steps``.

    Attributes:
        draws: Random numbers are drawn while a step runs.
        repeats: Steps that began in a random state in which an earlier one began, the first in ``since_repeat``.
        repeated_step: The step in whose state that one began.
        written: Steps that changed the model's input in place; ``written_views`` of these a part of a larger tensor.
        came_again: Samples, or parts of a tensor, that came again. ``changed`` of them were ``factor`` times what they
            were, up to a constant, the first in ``since_changed``. ``is_one_factor``: the first had the same factor.
        source: The line that reads their loader.
    """

    experiment: ClassVar[str] = "steadiness"
    steps: int
    draws: bool = False
    repeats: int = 0
    since_repeat: int = 0
    repeated_step: int = 0
    written: int = 0
    written_views: int = 0
    since_written: int = 0
    came_again: int = 0
    changed: int = 0
    factor: float = 1.0
    is_one_factor: bool = False
    since_changed: int = 0
    source: str | None = None
