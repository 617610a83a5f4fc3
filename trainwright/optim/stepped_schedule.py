"""Schedules of the user: functions of the step, and torch's LRScheduler objects."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from trainwright.checkpoint.chained_optimizer import parts_of
from trainwright.checkpoint.codec import StateDict
from trainwright.errors import UsageError, text_of
from trainwright.optim.user_optimizers import name_of, takes_first

ScheduleFn = Callable[[int, float], float | None]
RATE_NAMES = ("lr", "initial_lr", "momentum", "betas")
"""Entries that schedulers write into a parameter group."""
MAX_STORED_CHANGES = 4096
"""Maximum number of stored rate changes. They give a replayed step its original learning rates."""


class SteppedSchedule:
    """Uses torch's schedulers as a schedule of the engine. Each is stepped every ``every`` steps.

    ReduceLROnPlateau is stepped by ``evaluated``. A checkpoint contains the state of the schedulers, which determines
    the learning rates. Later changes of the rates are kept in memory, so that a replayed step has the same rates.
    """

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[LRScheduler], every: int = 1) -> None:
        self._optimizer, self._every = optimizer, every
        self._schedulers = list(schedulers)
        self._done = 0  # number of optimizer steps up to which the schedulers are current
        self._changes = deque([(0, self._rates())], maxlen=MAX_STORED_CHANGES)

    @property
    def name(self) -> str:
        return ", ".join(dict.fromkeys(type(each).__name__ for each in self._schedulers))

    @property
    def needs_evaluation(self) -> bool:
        return any(isinstance(each, ReduceLROnPlateau) for each in self._schedulers)

    def __call__(self, step: int, _fraction: float) -> float | None:
        """Set the rates of the update after ``step`` steps."""
        for due in range(self._done // self._every + 1, step // self._every + 1):
            for scheduler in self._schedulers:
                if not isinstance(scheduler, ReduceLROnPlateau):
                    _step(scheduler)
            self._record(due * self._every)
        self._done = max(self._done, step)
        self._write(next((rates for since, rates in reversed(self._changes) if since <= step), self._changes[0][1]))
        return None

    def require_steps(self, steps: int) -> None:
        """Raise UsageError if a OneCycleLR can make fewer steps than a run of ``steps`` needs."""
        needed = (steps - 1) // self._every
        for each in self._schedulers:
            if isinstance(each, OneCycleLR) and each.total_steps < needed:
                raise UsageError(
                    f"OneCycleLR was made for total_steps={each.total_steps}, and the run has {steps:,} steps",
                    remedy=f"write total_steps={needed + 1}, or train for fewer steps",
                )

    def evaluated(self, step: int, value: float) -> None:
        """Step the schedulers that depend on the validation, whose metric was ``value`` after ``step`` steps."""
        self(step, 0.0)
        for scheduler in self._schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(value)
        self._record(step)

    def state_dict(self) -> StateDict:
        return {
            "done": self._done,
            "schedulers": [_without_code(each.state_dict()) for each in self._schedulers],
            "rates": self._changes[-1][1],
        }

    def load_state_dict(self, saved: Mapping[str, object]) -> None:
        for scheduler, state in zip(self._schedulers, saved["schedulers"], strict=True):  # type: ignore[call-overload]
            scheduler.load_state_dict(_matching_state(scheduler, state))
        self._done = int(saved["done"])  # type: ignore[call-overload]
        self._write(saved["rates"])  # type: ignore[arg-type]
        self._changes = deque([(0, self._rates())], maxlen=MAX_STORED_CHANGES)

    def _rates(self) -> list[StateDict]:
        def plain(value: object) -> object:
            return float(value) if isinstance(value, Tensor) else value

        groups = self._optimizer.param_groups
        return [{name: plain(group[name]) for name in RATE_NAMES if name in group} for group in groups]

    def _record(self, step: int) -> None:
        if (rates := self._rates()) != self._changes[-1][1]:
            self._changes.append((step, rates))

    def _write(self, rates: Sequence[StateDict]) -> None:
        for group, each in zip(self._optimizer.param_groups, rates, strict=True):
            for name, value in each.items():
                if isinstance(group.get(name), Tensor):  # a captured or compiled optimizer refers to it
                    group[name].fill_(value)
                else:
                    group[name] = value


def _step(scheduler: LRScheduler) -> None:
    if scheduler.last_epoch > 0:
        scheduler.step()
        return
    with warnings.catch_warnings():  # torch warns if the finite guard skipped the first update
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
        scheduler.step()


def _without_code(state: object) -> StateDict:
    """Return the state without functions, which are recreated with the scheduler."""

    def kept(value: object) -> object:
        if isinstance(value, Counter):
            return {key: count for key, count in value.items()}  # noqa: C416  a plain dict
        if isinstance(value, Mapping):
            return {key: kept(each) for key, each in value.items() if not callable(each)}
        return [kept(each) for each in value if not callable(each)] if isinstance(value, list) else value

    found = kept(state)
    assert isinstance(found, dict)
    return found


def _matching_state(scheduler: LRScheduler, state: StateDict) -> StateDict:
    """Return the saved values of existing entries, with the container types of the scheduler."""
    now = scheduler.state_dict()
    unknown = [name for name in state if name not in now]
    if unknown:
        raise ValueError(f"{type(scheduler).__name__} has no {unknown[0]!r}")
    for name, value in state.items():
        if _shape(value) != _shape(now[name]) and None not in (value, now[name]):
            raise ValueError(f"{name} of {type(scheduler).__name__} is {value!r}")
    return {**now, **{name: _typed(value, now[name]) for name, value in state.items()}}


def _typed(saved: object, now: object) -> object:
    """Return ``saved`` with the container types of ``now``, because a file stores a Counter as a plain mapping."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        each = {key: _typed(value, now.get(key)) for key, value in saved.items()}
        return Counter(each) if isinstance(now, Counter) else each
    if isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        return [_typed(one, other) for one, other in zip(saved, now, strict=True)]
    return saved


def _shape(value: object) -> object:
    """Return the structure of a value: nested lists of types, with "number" for int and float."""
    if isinstance(value, list | tuple):
        return [_shape(each) for each in value]
    return "number" if isinstance(value, int | float) else "mapping" if isinstance(value, Mapping) else type(value)


def unchanged(step: int, fraction: float) -> None:
    """Leave the learning rates of the optimizer unchanged: the constant schedule."""


def convert_schedule(schedule: object, optimizer: Optimizer, every: int) -> ScheduleFn | SteppedSchedule:
    """Convert a user's schedule: schedulers of torch, a function from an optimizer to schedulers or of the step.

    Raises:
        UsageError: Any other object, or a scheduler of another optimizer.
    """
    if (listed := _schedulers(schedule)) is not None:
        for each in listed:
            if not any(each.optimizer is part for part in parts_of(optimizer)):
                raise UsageError(
                    f"{type(each).__name__} is over another optimizer than the one that trains",
                    remedy="give that optimizer as optimizer=, or give the schedule as a class or a partial: "
                    "functools.partial(torch.optim.lr_scheduler.StepLR, step_size=30)",
                )
        return SteppedSchedule(optimizer, listed, every)
    if callable(schedule) and takes_first(schedule, "optimizer"):
        made = [_made(schedule, part) for part in parts_of(optimizer)]
        return SteppedSchedule(optimizer, list(chain(*made)), every)
    return function_of_step(schedule)


def _schedulers(value: object) -> list[LRScheduler] | None:
    """Return one or several schedulers as a list; None for anything else."""
    listed = value if isinstance(value, list | tuple) and value else [value]
    found = [each for each in listed if isinstance(each, LRScheduler)]
    return found if len(found) == len(listed) else None


def _made(factory: Callable[..., object], optimizer: Optimizer) -> list[LRScheduler]:
    name = name_of(factory)
    try:
        made = factory(optimizer)
    except (TypeError, ValueError) as error:
        remedy = f"give it the rest of its arguments: functools.partial({name}, ...)"
        raise UsageError(f"{name} cannot be made: {text_of(error)}", remedy=remedy) from None
    if (listed := _schedulers(made)) is None:
        raise UsageError(
            f"{name} gave a {type(made).__name__} for an optimizer",
            remedy="return a torch.optim.lr_scheduler.LRScheduler",
        )
    return listed


def function_of_step(function: object) -> ScheduleFn:
    """Return a function of (step, fraction) that calls the user's ``f(step)`` or ``f(step, fraction)`` and checks the
    returned factor on each base learning rate.
    """
    forms = "f(step) or f(step, fraction) that returns the factor on the learning rate"
    if not callable(function) or isinstance(function, type):
        what = f"the class {function.__name__}" if isinstance(function, type) else f"a {type(function).__name__}"
        raise UsageError(
            f"the schedule is {what}", remedy=f"give a name, an LRScheduler of torch, or a function: {forms}"
        )
    name = getattr(function, "__name__", type(function).__name__)
    takes_fraction = _takes_fraction(function)
    if takes_fraction is None:
        shown = f"{name}{inspect.signature(function)}"
        raise UsageError(f"the schedule {shown} takes neither one nor two arguments", remedy=f"write {forms}")

    def schedule(step: int, fraction: float) -> float:
        factor = function(step, fraction) if takes_fraction else function(step)
        if isinstance(factor, Tensor):
            factor = float(factor)
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 <= factor < float("inf"):
            raise UsageError(f"the schedule {name} returned {factor!r} for step {step}", remedy=f"write {forms}")
        return factor

    return schedule


def _takes_fraction(function: Callable[..., object]) -> bool | None:
    """Return True if the function takes (step, fraction), False for (step), None for neither.

    A second parameter with a default is an option of the function unless it is named ``fraction``.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a builtin without a signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not positional or any(p not in positional[:2] for p in required):
        return None
    return len(positional) > 1 and (positional[1] in required or positional[1].name == "fraction")
