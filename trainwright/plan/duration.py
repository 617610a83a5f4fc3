"""Durations of a recipe (`1000steps`, `2ep`, `5Mtok`, `60s`, `0.1run`) in the units that the engine counts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainwright.errors import Problem, RecipeError
from trainwright.recipe import Duration
from trainwright.recipe.duration import BUDGETS


@dataclass(frozen=True)
class Extent:
    """The length of the run: ``steps`` optimizer steps, or ``seconds`` of training time; the other is None."""

    steps: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Pace:
    """The data that one step consumes. ``steps_per_epoch`` is None when the dataset has no length."""

    batch_size: int
    steps_per_epoch: int | None = None
    tokens_per_sample: int = 0


@dataclass(frozen=True)
class Interval:
    """A period in steps, seconds of training, or fractions of the run; exactly one is set."""

    steps: int | None = None
    seconds: float | None = None
    fraction: float | None = None


def extent(until: Duration, pace: Pace, *, step: int = 0, used: float = 0.0) -> Extent:
    """Return the length of the run.

    If the batch size changed, ``step`` is the number of steps before the change, and ``used`` is the length that they
    took, in the unit of ``until``.
    """
    if until.unit in BUDGETS:
        rule = "a budget in USD or kWh becomes a time only where the run is trained, on its device"
        raise RecipeError(Problem("until", rule, got=str(until), remedy="write a length in steps, epochs or seconds"))
    if until.unit == "s":
        return Extent(seconds=until.value)
    left = Duration(max(0.0, until.value - used), until.unit)
    return Extent(steps=max(1, step + _steps(left, pace, "until")))


def span(duration: Duration, whole: Extent, pace: Pace, path: str) -> int | float:
    """Return steps (int), or a fraction of the run (float) if the run is budgeted in time and so has no step count."""
    if duration.unit == "run":
        return duration.value if whole.steps is None else round(duration.value * whole.steps)
    if duration.unit == "s":
        if whole.seconds is None:
            rule = "seconds can only be part of a run that is budgeted in seconds"
            remedy = "give it as steps or as a fraction of the run (0.1run), or give `until` in seconds"
            raise RecipeError(Problem(path, rule, got=str(duration), remedy=remedy))
        return duration.value / whole.seconds
    return _steps(duration, pace, path)


def interval(duration: Duration, whole: Extent, pace: Pace, path: str) -> Interval:
    """Return the period of a repeated action. Raises RecipeError for a unit that the data lack."""
    if duration.unit == "s":
        return Interval(seconds=duration.value)
    if duration.unit == "run":
        if whole.steps is None:
            return Interval(fraction=duration.value)
        return Interval(steps=max(1, round(duration.value * whole.steps)))
    return Interval(steps=max(1, _steps(duration, pace, path)))


def _steps(duration: Duration, pace: Pace, path: str) -> int:
    match duration.unit:
        case "steps":
            return int(duration.value)
        case "samples":
            return math.ceil(duration.value / pace.batch_size)
        case "ep":
            if pace.steps_per_epoch is None:
                rule = "epochs need a dataset with a length; this one is a stream"
                remedy = "give it in steps, samples, tokens or seconds"
                raise RecipeError(Problem(path, rule, got=str(duration), remedy=remedy))
            return round(duration.value * pace.steps_per_epoch)
        case _:
            if not pace.tokens_per_sample:
                rule = "tokens need batches whose inputs are token ids (integers, two dimensions)"
                remedy = "give it in steps, epochs or samples"
                raise RecipeError(Problem(path, rule, got=str(duration), remedy=remedy))
            return math.ceil(duration.value / (pace.batch_size * pace.tokens_per_sample))
