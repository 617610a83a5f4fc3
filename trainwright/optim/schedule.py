"""Learning-rate schedules: pure functions of the position in the run, without scheduler state to save.

A schedule maps (``step``, ``fraction``) to the factor on every base learning rate. ``step`` is the number i of
optimizer steps completed before this update (0 for the first one), ``fraction`` the completed fraction of the run.

With ``total`` (steps of the run) everything is counted in steps and ``fraction`` is ignored; a fraction s of the run is
round(s * total) steps. ``total=None`` means that the run is budgeted in time: spans use ``fraction``.

    factor = warm * decay(t)
    warm   = w0 + (1 - w0) (i + 1) / W     for i < W, else 1    (Goyal et al. 2017, arXiv 1706.02677, 2.2)
    t      = clamp((i - W) / (total - W), 0, 1), decay(0) = 1

W is ``warmup`` in steps and w0 ``warmup_floor``. Under a time budget a warm-up of W steps is as above with t =
fraction; a warm-up of a fraction s is warm = w0 + (1 - w0) fraction / s with t = (fraction - s) / (1 - s). As t is
computed before the update, the factor of the last update is one step short of the floor, as in nanoGPT and torch.
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch.optim import Optimizer
from torch.optim.swa_utils import SWALR

from trainwright.checkpoint.chained_optimizer import parts_of
from trainwright.checkpoint.codec import StateDict
from trainwright.errors import Problem, UsageError, require_choice, unknown_args
from trainwright.optim.stepped_schedule import MAX_STORED_CHANGES, SteppedSchedule
from trainwright.plan.make import SwaPlan
from trainwright.recipe import SCHEDULES
from trainwright.recipe.resolve import import_factory

ScheduleFn = Callable[[int, float], float]
Span = int | float
"""``int``: optimizer steps. ``float`` in (0, 1]: fraction of the run (0 or 0.0: none)."""


def _require(ok: bool, message: str, remedy: str) -> None:
    if not ok:
        raise UsageError(message, remedy=remedy)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require_span(name: str, value: object) -> None:
    _require(
        _is_number(value) and (value >= 0 if isinstance(value, int) else 0 <= value <= 1),  # type: ignore[operator]
        f"{name} must be a whole number of steps or a fraction of the run between 0 and 1; got {value!r}",
        f"{name}=100 is 100 steps, {name}=0.1 a tenth of the run",
    )


@dataclass(frozen=True, kw_only=True)
class ConstantSchedule:
    """decay(t) = 1: the warm-up, then the base learning rate. Base of the other schedules.

    ``floor`` is the factor at the end of a decay, so it has no effect here.
    """

    total: int | None = None
    warmup: Span = 0
    floor: float = 0.0
    warmup_floor: float = 0.0

    def __post_init__(self) -> None:
        _require_span("warmup", self.warmup)
        if self.total is not None:
            _require(self.total >= 1, f"total must be at least 1 step; got {self.total}", "give the steps of the run")
        for name in ("floor", "warmup_floor"):
            value = getattr(self, name)
            _require(
                _is_number(value) and 0 <= value <= 1,
                f"{name} must be a factor between 0 and 1 on the base learning rate; got {value!r}",
                f"{name}=0.1 is a tenth of the base learning rate",
            )

    def __call__(self, step: int, fraction: float) -> float:
        return self._warm(step, fraction) * self._decay(step, fraction)

    def _decay(self, _step: int, _fraction: float) -> float:
        return 1.0

    def _in_steps(self, span: Span) -> bool:
        """Return True if ``span`` is counted in steps (else in fractions of the run)."""
        return self.total is not None or isinstance(span, int)

    def _length(self, span: Span) -> float:
        """Return ``span`` in steps, or in fractions of a run without ``total``."""
        if self.total is None or isinstance(span, int):
            return span
        return round(span * self.total)

    @cached_property
    def _warmup(self) -> tuple[float, bool]:
        """Length of the warm-up, and True if that is in steps."""
        return self._length(self.warmup), self._in_steps(self.warmup)

    @cached_property
    def _decay_span(self) -> tuple[float, float]:
        """Start and length of the decay, in steps, or in fractions of a run without ``total``."""
        warmup, in_steps = self._warmup
        start = warmup if in_steps == (self.total is not None) else 0
        return start, (1.0 if self.total is None else self.total) - start

    def _warm(self, step: int, fraction: float) -> float:
        warmup, in_steps = self._warmup
        done = step + 1 if in_steps else fraction
        return 1.0 if done >= warmup else self.warmup_floor + (1 - self.warmup_floor) * done / warmup

    def _since_warmup(self, step: int, fraction: float, unit: Span) -> float:
        """Return the part of the run since the warm-up: in steps if ``unit`` is in steps, else as a fraction."""
        in_steps = self._in_steps(unit)
        start = self._length(self.warmup) if self._in_steps(self.warmup) == in_steps else 0
        return max(0.0, (step if in_steps else fraction) - start)

    def _position(self, step: int, fraction: float) -> float:
        """Return t of the module docstring."""
        start, length = self._decay_span
        past = (fraction if self.total is None else step) - start
        return min(1.0, max(0.0, past) / length) if length > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Cosine(ConstantSchedule):
    """decay(t) = floor + (1 - floor) (1 + cos(pi t)) / 2, one half wave.

    Loshchilov & Hutter 2017, arXiv 1608.03983, eq. 5 without restarts.
    """

    def _decay(self, step: int, fraction: float) -> float:
        return _half_wave(self._position(step, fraction), 1.0, self.floor)


@dataclass(frozen=True, kw_only=True)
class Restarts(ConstantSchedule):
    """Cosine with warm restarts, SGDR (Loshchilov & Hutter 2017, arXiv 1608.03983, eq. 5).

    Cycle k lasts cycle * mult**k from the end of the warm-up on and falls from max(floor, decay**k) to
    ``floor``.
    """

    cycle: Span = 0.25
    mult: float = 1.0
    decay: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_span("cycle", self.cycle)
        _require(self._length(self.cycle) > 0, f"cycle={self.cycle!r} is no step at all", "give a longer cycle")
        _require(_is_number(self.mult) and self.mult >= 1, f"mult must be >= 1; got {self.mult!r}", "try mult=2")
        _require_factor("decay", self.decay)

    def _decay(self, step: int, fraction: float) -> float:
        length, past = self._length(self.cycle), self._since_warmup(step, fraction, self.cycle)
        count = int(past // length) if self.mult == 1 else 0
        past -= count * length
        while past >= length:
            past -= length
            length *= self.mult
            count += 1
        return _half_wave(past / length, max(self.floor, self.decay**count), self.floor)


@dataclass(frozen=True, kw_only=True)
class Linear(ConstantSchedule):
    """decay(t) = floor + (1 - floor) (1 - t)."""

    def _decay(self, step: int, fraction: float) -> float:
        return self.floor + (1 - self.floor) * (1 - self._position(step, fraction))


@dataclass(frozen=True, kw_only=True)
class Polynomial(ConstantSchedule):
    """decay(t) = floor + (1 - floor) (1 - t)^power ("poly", Liu et al. 2015, arXiv 1506.04579, 3.4)."""

    power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            _is_number(self.power) and self.power > 0, f"power must be > 0; got {self.power!r}", "power=1 is linear"
        )

    def _decay(self, step: int, fraction: float) -> float:
        return self.floor + (1 - self.floor) * math.pow(1 - self._position(step, fraction), self.power)


@dataclass(frozen=True, kw_only=True)
class StepDecay(ConstantSchedule):
    """decay = max(floor, gamma**k), with k the number of full spans ``every`` since the end of the warm-up.

    He et al. 2015, arXiv 1512.03385, 3.4: divided by 10 at each plateau.
    """

    every: Span = 1 / 3
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_span("every", self.every)
        _require(self._length(self.every) > 0, f"every={self.every!r} is no step at all", "give a longer span")
        _require_factor("gamma", self.gamma)

    def _decay(self, step: int, fraction: float) -> float:
        past = self._since_warmup(step, fraction, self.every)
        return max(self.floor, self.gamma ** int(past // self._length(self.every)))


@dataclass(frozen=True, kw_only=True)
class WSD(ConstantSchedule):
    """Warm-up, stable, decay (Hu et al. 2024, MiniCPM, arXiv 2404.06395, 4.2).

    In the last span ``decay`` of the run the factor falls from 1 to ``floor``. With u in [0, 1] the position in this
    span, it is floor + (1 - floor) * y, where y is 1 - u (linear), 1 - sqrt(u) (sqrt; Haegele et al. 2024, arXiv
    2405.18392, 4.1) or (1 + cos(pi u)) / 2 (cosine).
    """

    decay: Span = 0.2
    shape: Literal["linear", "sqrt", "cosine"] = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_span("decay", self.decay)
        require_choice("shape", self.shape, ("linear", "sqrt", "cosine"))
        _require(
            self.total is not None or isinstance(self.decay, float),
            f"decay={self.decay!r} steps cannot be placed at the end of a run that is budgeted in time",
            "give decay as a fraction of the run, such as decay=0.2",
        )

    def _decay(self, step: int, fraction: float) -> float:
        now, end = (fraction, 1.0) if self.total is None else (step, self.total)
        length = self._length(self.decay)
        u = min(1.0, max(0.0, (now - (end - length)) / length)) if length else 0.0
        if self.shape == "cosine":
            return _half_wave(u, 1.0, self.floor)
        left = 1 - (math.sqrt(u) if self.shape == "sqrt" else u)
        return self.floor + (1 - self.floor) * left


def _half_wave(t: float, peak: float, floor: float) -> float:
    return floor + (peak - floor) * (1 + math.cos(math.pi * t)) / 2


def _require_factor(name: str, value: object) -> None:
    ok = _is_number(value) and 0 < value <= 1  # type: ignore[operator]
    _require(ok, f"{name} must be a factor in (0, 1]; got {value!r}", f"try {name}=0.5")


def make_schedule(
    name: str,
    *,
    total: int | None,
    warmup: Span = 0,
    floor: float = 0.0,
    args: Mapping[str, object] | None = None,
) -> ScheduleFn:
    """Return the schedule ``name`` of the catalog.

    Args:
        name: See docs/reference/catalog.md.
        total: Steps of the run; None: the run is budgeted in time.
        warmup: Steps (int) or fraction of the run (float).
        floor: Factor at the end of the decay.
        args: Further fields of the schedule (``warmup_floor``, ``power`` ...).

    Returns:
        A function of (completed steps, completed fraction of the run): the factor on every base learning rate.

    Raises:
        UsageError: Unknown name or argument, or a value out of range.
    """
    require_choice("schedule", name, SCHEDULES)
    for found in wrong_args(name, args or {}):
        raise UsageError(found.rule, remedy=found.remedy)
    schedule: ScheduleFn = import_factory(SCHEDULES[name].factory)(
        total=total, warmup=warmup, floor=floor, **(args or {})
    )
    return schedule


def wrong_args(name: str, args: Iterable[str]) -> list[Problem]:
    """Return the problems of arguments that the schedule ``name`` does not accept."""
    fields = inspect.signature(import_factory(SCHEDULES[name].factory)).parameters
    accepted = [each for each in fields if each not in ("total", "warmup", "floor")]
    return unknown_args(f"the schedule {name!r}", "schedule.args", args, accepted)


class SwaSchedule(SteppedSchedule):
    """``base`` up to and including the step of the first average; then SWALR, stepped after each average.

    SWALR starts at the last learning rates of ``base``. ``lr`` applies to the first parameter group; the learning rates
    of the others keep their ratio to it.
    """

    def __init__(
        self,
        base: Callable[[int, float], float | None] | SteppedSchedule,
        optimizer: Optimizer,
        plan: SwaPlan,
        lr: float,
        anneal_by: Literal["cos", "linear"],
    ) -> None:
        super().__init__(optimizer, [], plan.every)
        self.base = base
        self._plan = plan
        self._lr = lr
        self._anneal_by = anneal_by

    @property
    def name(self) -> str:
        return f"{getattr(self.base, 'name', 'its schedule')}, then SWALR"

    @property
    def needs_evaluation(self) -> bool:
        return isinstance(self.base, SteppedSchedule) and self.base.needs_evaluation

    def __call__(self, step: int, fraction: float) -> float | None:
        if step >= self._plan.start:
            self._begin()
            return super().__call__(step - self._plan.start + self._every, fraction)
        if self._schedulers:  # an earlier step is replayed
            self._write(self._changes[0][1])
        return self.base(step, fraction)

    def evaluated(self, step: int, value: float) -> None:
        if step < self._plan.start and isinstance(self.base, SteppedSchedule):
            self.base.evaluated(step, value)

    def state_dict(self) -> StateDict:
        return super().state_dict() | ({} if self._schedulers else {"rates": self._rates()})

    def load_state_dict(self, saved: Mapping[str, object]) -> None:
        if saved["schedulers"]:
            self._begin()
        super().load_state_dict(saved)

    def _begin(self) -> None:
        """Create the schedulers, which start at the current rates of the optimizer."""
        if self._schedulers:
            return
        self._changes = deque([(0, self._rates())], maxlen=MAX_STORED_CHANGES)
        first = self._optimizer.param_groups[0]
        for part in parts_of(self._optimizer):
            bases = [float(group.get("initial_lr", group["lr"])) for group in part.param_groups]
            lrs = [self._lr * (base / float(first.get("initial_lr", first["lr"]))) for base in bases]
            self._schedulers.append(SWALR(part, lrs, self._plan.anneal, self._anneal_by))  # type: ignore[arg-type]
