"""Measurements of the live loop: repeated random states, and steps that write to their input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class SteadinessFacts:
    """Random states and inputs over all steps."""

    experiment: ClassVar[str] = "steadiness"
    steps: int  # Number of steps
    draws: bool = False  # Random numbers are drawn during a step
    repeats: int = 0  # Number of steps that began in the random state of an earlier step
    since_repeat: int = 0  # The first of them
    repeated_step: int = 0  # The earlier step with the same state
    written: int = 0  # Number of steps that changed the model's input in place
    written_views: int = 0  # Number of these in which the input was a view of a larger tensor
    since_written: int = 0  # The first of them
