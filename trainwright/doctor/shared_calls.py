"""The calls of recorded steps."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.runs.json_values import Event
from trainwright.runs.records import Watched


def kinds(step: Watched, *wanted: str) -> list[Event]:
    """Returns the events of these kinds, in order."""
    return [each for each in step.events if each[0] in wanted]


def has_closure(step: Watched) -> bool:
    """Returns True if the optimizer called a closure and so determined the order of events itself."""
    return "closure" in str(step.values.get("blind", ""))


def optimizers_of(steps: Sequence[Watched]) -> list[int]:
    """Returns the numbers of the optimizers that step."""
    return sorted({v["optimizer"] for each in steps for k, v in each.events if k == "step" and isinstance(v, dict)})
