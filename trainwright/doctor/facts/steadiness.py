"""Measurements of the live loop: repeated random states, and data that are changed in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class SteadinessFacts:
    """Random states and data over all steps.

    Attributes:
        steps: Number of steps.
        draws: Random numbers are drawn during a step.
        repeats: Number of steps that began in the random state of an earlier step.
        since_repeat: The first of them.
        repeated_step: The earlier step with the same state.
        written: Number of steps that changed the model's input in place.
        written_views: Number of these in which the input was a view of a larger tensor.
        since_written: The first of them.
        came_again: Number of samples, or slices of a tensor, that were read again.
        changed: Number of these that had become a multiple of their earlier value, up to a constant.
        factor: The multiple.
        is_one_factor: The first change had the same factor.
        since_changed: The first step with such a change.
        source: Line that reads their loader.
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
