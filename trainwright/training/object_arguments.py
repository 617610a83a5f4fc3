"""Describes objects that are passed to ``tw.fit`` as sections of a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright.errors import UsageError
from trainwright.optim.stepped_schedule import function_of_step
from trainwright.optim.user_optimizers import makes_own_groups, takes_first
from trainwright.recipe.resolve import LIVE

OBJECT_SECTIONS = (("model",), ("loss",), ("data", "train"), ("data", "val"), ("data", "more_val"))
"""Recipe sections that ``fit`` receives as objects: ``settings`` may set neither ``use`` nor ``args``.

A loss may also be a name; its ``args`` may then be set.
"""


class ObjectArguments(NamedTuple):
    """The optimizer and schedule of a call of ``tw.fit`` that are objects rather than names.

    Attributes:
        optimizer: The optimizer; None if the recipe names it.
        schedule: The schedule; None if the recipe names it.
        sections: Recipe sections that describe them.
        may_set: For each section, the keys that ``settings`` may still set; None: all but ``use``.
    """

    optimizer: object
    schedule: object
    sections: dict[str, dict[str, object]]
    may_set: dict[str, tuple[str, ...] | None]

    def conflicting_argument(self, keys: Sequence[str]) -> str:
        """Return the argument, passed as an object, that a setting at this path would contradict; "" for none."""
        for section in OBJECT_SECTIONS:
            if (
                section[0] not in self.may_set
                and tuple(keys[: len(section)]) == section
                and (len(keys) == len(section) or keys[len(section)] in ("use", "args"))
            ):
                return section[-1]
        if keys[0] not in self.may_set:
            return ""
        allowed = self.may_set[keys[0]]
        is_allowed = len(keys) > 1 and (keys[1] in allowed if allowed is not None else keys[1] != "use")
        return "" if is_allowed else keys[0]


def object_arguments(
    optimizer: object, schedule: object, loss: object, *, lr: float | None, warmup: str | None
) -> ObjectArguments:
    """Return the passed objects with their recipe sections. Raises UsageError for an argument without effect."""
    found = ObjectArguments(None, None, {}, {"loss": None} if isinstance(loss, str) else {})
    if optimizer is not None and not isinstance(optimizer, str):
        found = found._replace(optimizer=optimizer)
        found.sections["optimizer"] = {"use": live_name(optimizer), **_rates(optimizer, lr)}
        found.may_set["optimizer"] = None if callable(optimizer) else ("clip",)
    if schedule is not None and not isinstance(schedule, str):
        _require_schedule(schedule)
        if warmup is not None:
            raise UsageError(
                "warmup has no effect on a custom schedule", remedy="leave warmup out, and warm up in the schedule"
            )
        found = found._replace(schedule=schedule)
        found.sections["schedule"] = {"use": live_name(schedule)}
        found.may_set["schedule"] = ("every",)
    return found


def live_name(thing: object) -> str:
    """Return the name for an object in a recipe. No file can build such an object."""
    if isinstance(thing, list | tuple):
        return f"{LIVE}:several"
    thing = getattr(thing, "func", thing)  # unwraps a partial
    name = getattr(thing, "__name__", type(thing).__name__)
    return f"{LIVE}:{name if name.isidentifier() else type(thing).__name__}"


def _rates(optimizer: object, lr: float | None) -> dict[str, object]:
    """Return the learning rate and weight decay of the passed optimizer, so that the recipe shows them."""
    if callable(optimizer):
        known = {key: value for key, value in _keywords(optimizer).items() if key in ("lr", "weight_decay")}
        if lr is not None and ("lr" in known or makes_own_groups(optimizer)):
            raise UsageError(
                f"lr={lr} has no effect: {live_name(optimizer).partition(':')[2]} sets its learning rate itself",
                remedy="leave lr out, or remove it from the function that makes the optimizer",
            )
        return {key: float(value) for key, value in known.items() if isinstance(value, int | float)}
    if lr is not None:
        raise UsageError(
            f"lr={lr} has no effect on an existing optimizer", remedy="leave lr out and set it in the optimizer"
        )
    first = optimizer[0] if isinstance(optimizer, list | tuple) and optimizer else optimizer
    if not isinstance(first, Optimizer):
        return {}
    group = first.param_groups[0]
    rate = float(group.get("initial_lr", group.get("lr", 0.0)))
    return {"lr": rate} if rate > 0 else {}


def _keywords(factory: object) -> Mapping[str, object]:
    return factory.keywords if isinstance(factory, partial) else {}


def _require_schedule(schedule: object) -> None:
    listed = schedule if isinstance(schedule, list | tuple) else [schedule]
    if listed and all(isinstance(each, LRScheduler) for each in listed):
        return
    if not (callable(schedule) and takes_first(schedule, "optimizer")):
        function_of_step(schedule)
