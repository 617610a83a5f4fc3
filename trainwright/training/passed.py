"""What a call of ``tw.fit`` passes as objects, in the words of a recipe."""

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

ALWAYS_PASSED = (("model",), ("loss",), ("data", "train"), ("data", "val"), ("data", "more_val"))
"""Sections of the recipe that ``fit`` is given as objects: neither ``use`` nor ``args`` may be set."""


class GivenObjects(NamedTuple):
    """Optimizer and schedule where they are objects; None where the recipe names them.

    ``sections`` describe them, and ``may_set`` has the keys of such a section that ``settings`` may still set; None:
    all but ``use``.
    """

    optimizer: object
    schedule: object
    sections: dict[str, dict[str, object]]
    may_set: dict[str, tuple[str, ...] | None]

    def refuses(self, keys: Sequence[str]) -> str:
        """The argument that was handed over and of which this path would say something else; "" for none."""
        for section in ALWAYS_PASSED:
            if tuple(keys[: len(section)]) == section and (
                len(keys) == len(section) or keys[len(section)] in ("use", "args")
            ):
                return section[-1]
        if keys[0] not in self.may_set:
            return ""
        allowed = self.may_set[keys[0]]
        is_allowed = len(keys) > 1 and (keys[1] in allowed if allowed is not None else keys[1] != "use")
        return "" if is_allowed else keys[0]


def passed(optimizer: object, schedule: object, *, lr: float | None, warmup: str | None) -> GivenObjects:
    """Takes the names from the objects. Raises UsageError for an argument that an object makes meaningless."""
    found = GivenObjects(None, None, {}, {})
    if optimizer is not None and not isinstance(optimizer, str):
        found = found._replace(optimizer=optimizer)
        found.sections["optimizer"] = {"use": live_name(optimizer), **_rates(optimizer, lr)}
        found.may_set["optimizer"] = None if callable(optimizer) else ("clip",)
    if schedule is not None and not isinstance(schedule, str):
        _require_schedule(schedule)
        if warmup is not None:
            raise UsageError(
                "warmup has no effect on a schedule of your own", remedy="leave warmup out, and warm up in the schedule"
            )
        found = found._replace(schedule=schedule)
        found.sections["schedule"] = {"use": live_name(schedule)}
        found.may_set["schedule"] = ("every",)
    return found


def live_name(thing: object) -> str:
    """What a recipe says of an object that no file can build."""
    if isinstance(thing, list | tuple):
        return f"{LIVE}:several"
    thing = getattr(thing, "func", thing)  # of a partial
    name = getattr(thing, "__name__", type(thing).__name__)
    return f"{LIVE}:{name if name.isidentifier() else type(thing).__name__}"


def _rates(optimizer: object, lr: float | None) -> dict[str, object]:
    """Learning rate and weight decay of what was passed, so that the recipe shows them."""
    if callable(optimizer):
        known = {key: value for key, value in _keywords(optimizer).items() if key in ("lr", "weight_decay")}
        if lr is not None and ("lr" in known or makes_own_groups(optimizer)):
            raise UsageError(
                f"lr={lr} has no effect: {live_name(optimizer).partition(':')[2]} has a learning rate of its own",
                remedy="leave lr out, or take it out of what makes the optimizer",
            )
        return {key: float(value) for key, value in known.items() if isinstance(value, int | float)}
    if lr is not None:
        raise UsageError(
            f"lr={lr} has no effect on an optimizer that is made already", remedy="leave lr out, and give it its rate"
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
