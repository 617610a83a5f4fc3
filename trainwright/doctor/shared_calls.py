"""The calls of recorded steps, as checks read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainwright.runlog.json_values import Event
from trainwright.runlog.records import Watched

LETTERS: Mapping[str, str] = {
    "forward": "f", "backward": "b", "autograd_grad": "b", "zero_grad": "z", "unscale": "u", "clip": "c", "step": "s",
    "scaler_skipped": "s", "scaler_update": "a", "schedule": "l",
}  # fmt: skip
"""By kind of event. What is not here is not part of the order."""
WORDS: Mapping[str, str] = {
    "f": "forward", "b": "backward", "z": "zero_grad", "u": "unscale_", "c": "clip", "s": "step",
    "a": "scaler.update", "l": "scheduler.step",
}  # fmt: skip


def kinds(step: Watched, *wanted: str) -> list[Event]:
    """The events of these kinds, in order."""
    return [each for each in step.events if each[0] in wanted]


def has_closure(step: Watched) -> bool:
    """Whether the optimizer called a closure: it then decides itself in which order the events come."""
    return "closure" in str(step.values.get("blind", ""))


def word(step: Watched, optimizer: int) -> str:
    """The letters of the calls of a step that concern one optimizer, by its number: ``zfbcs``."""
    return "".join(LETTERS[kind] for kind, value in step.events if kind in LETTERS and _is_for(kind, value, optimizer))


def _is_for(kind: str, value: object, optimizer: int) -> bool:
    if kind == "forward":
        return isinstance(value, list | tuple) and bool(value[2])  # those without gradients are evaluations
    if kind == "step":
        return isinstance(value, dict) and value["optimizer"] == optimizer
    return kind not in ("zero_grad", "unscale", "scaler_skipped") or value in (optimizer, -1)


def spelled(letters: str) -> str:
    """A word as the names of its calls."""
    return " ".join(WORDS[each] for each in letters)


def optimizers_of(steps: Sequence[Watched]) -> list[int]:
    """The numbers of the optimizers that step."""
    return sorted({v["optimizer"] for each in steps for k, v in each.events if k == "step" and isinstance(v, dict)})
