"""Measurements of the live loop: repeated random states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(kw_only=True)
class SteadinessFacts:
    """Random states at the starts of all steps."""

    experiment: ClassVar[str] = "steadiness"
    draws: bool = False  # Random numbers are drawn during a step
    repeats: int = 0  # Number of steps that began in the random state of an earlier step
    since_repeat: int = 0  # The first of them
    repeated_step: int = 0  # The earlier step with the same state
