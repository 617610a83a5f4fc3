"""Measures the learning rate over the steps, and the calls of each scheduler."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, SupportsFloat

from torch import Tensor
from torch.optim import Optimizer, lr_scheduler

from trainwright.doctor.facts.schedule import LearningRateFacts, PartFacts, PlateauMetric, SchedulerFacts, Window
from trainwright.doctor.measure.datasets import length_of
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.optimizers import same_optimizer, share_groups
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.user_types import Args, Kwargs, Loader

MAX_CHANGES = 64
MIN_STEPS_BEFORE_STRAY = 20
"""Steps after which an optimizer that has no parameters of the models and has not stepped is assumed never to step."""
NUMERIC_ATTRIBUTES = ("T_max", "total_steps", "total_iters", "step_size", "gamma")


class _Scheduler:
    """Calls of one scheduler. A window is the time between two updates."""

    def __init__(self, scheduler: object, optimizer: Optimizer, since: int) -> None:
        self.scheduler, self.optimizer = scheduler, optimizer
        self.found = SchedulerFacts(since=since)
        # ``since_call`` counts updates, the others count calls
        self.in_window = self.in_a_row = self.longest = self.since_call = 0
        self._is_first = True

    def stepped(self) -> None:
        if self.found.calls:
            self.found.repeated += self.since_call == 0
            self.found.advanced += self.since_call > 0
            self.found.advanced_once += self.since_call == 1
        self.found.calls, self.since_call = self.found.calls + 1, 0
        self.in_window, self.in_a_row = self.in_window + 1, self.in_a_row + 1
        self.longest = max(self.longest, self.in_a_row)

    def close(self, backwards: int) -> None:
        if not self._is_first:
            window = Window(self.in_window, backwards, self.longest)
            self.found.windows = (*self.found.windows[-7:], window)
        self._is_first = False
        self.in_window = self.in_a_row = self.longest = 0


class Schedules(Probe):
    """Observes schedulers, passed to the watch or not. ``urgent``: the learning rate fell, or rose after a cosine."""

    name = LearningRateFacts.experiment
    observes_every_step = True

    def __init__(self, watched: WatchedObjects) -> None:
        self._optimizers, self._roots = watched.subject.optimizers, watched.subject.roots
        self._found = LearningRateFacts()
        self._stepped: set[int] = set()
        self._has_rates = any("lr" in group for o in self._optimizers for group in o.param_groups)
        self._backwards = 0
        self._losses: deque[Tensor] = deque(maxlen=512)
        self._was_urgent: set[str] = set()
        self._schedulers: dict[int, _Scheduler] = {}
        for each in watched.schedulers:
            self._of(each)

    def _of(self, scheduler: object) -> _Scheduler | None:
        """Returns the record of a scheduler, which is any object with an ``optimizer``; None for other objects."""
        known = self._schedulers.get(id(scheduler))
        optimizer = same_optimizer(getattr(scheduler, "optimizer", None))
        if known is None and isinstance(optimizer, Optimizer):
            known = self._schedulers[id(scheduler)] = _Scheduler(scheduler, optimizer, self._found.steps)
        return known

    def on_epoch(self, loader: Loader, iterator: object) -> None:
        found = self._found
        if found.length is None or length_of(loader) == found.length:
            found.epochs += 1
            found.length = found.length or length_of(loader)

    def on_backward(self, losses: tuple[Tensor, ...], options: Kwargs) -> None:
        self._backwards += 1
        for each in self._schedulers.values():
            each.in_a_row = 0

    def on_schedule(self, scheduler: object) -> None:
        if (known := self._of(scheduler)) is not None:
            known.stepped()

    def on_metric(self, scheduler: object, metric: object) -> None:
        known = self._of(scheduler)
        # other schedulers are passed the epoch
        if known is not None and isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            value = float(metric) if isinstance(metric, SupportsFloat) else math.nan
            losses = [float(each) for each in self._losses]
            self._losses.clear()
            mean = sum(losses) / len(losses) if losses else math.nan
            seen = PlateauMetric(value, mean, max(_rates(known.optimizer), default=0.0))
            known.found.metrics = (*known.found.metrics, seen)[-MAX_CHANGES:]
            if len(known.found.metrics) > 2 and seen.lr < known.found.metrics[0].lr:
                self._be_urgent("cut")

    def on_step(self, optimizer: Optimizer, args: Args) -> None:
        self._stepped.add(id(optimizer))
        for each in self._schedulers.values():
            each.since_call += each.optimizer is optimizer

    def on_closed(self, step: RecordedStep) -> None:
        self._found.steps += 1
        for each in self._schedulers.values():
            each.close(self._backwards)
        self._backwards = 0
        if step.losses:
            self._losses.append(step.losses[0])
        if self._has_rates:
            lr = max([r for o in self._optimizers for r in _rates(o)], default=0.0)
            self._found.zero_steps += lr == 0.0
            if not self._found.lrs or lr != self._found.lrs[-1][1]:
                self._changed(lr)

    def _changed(self, lr: float) -> None:
        found = self._found
        before = found.lrs[-1][1] if found.lrs else None
        found.peak = max(found.peak, lr)
        if lr >= 1e-3 * found.peak:
            found.exhausted = None
        elif found.exhausted is None:
            found.exhausted = found.steps
        found.lrs = (*found.lrs, (found.steps, lr))[-MAX_CHANGES:]
        if before is not None:
            why = "fell" if lr < before else "climbs" if any(map(_is_past_its_end, self._schedulers.values())) else ""
            if why == "climbs":
                found.climbed = found.climbed or (found.steps, before, lr)
            self._be_urgent(why)  # a fault shows at the first change

    def _be_urgent(self, why: str) -> None:
        self.urgent |= bool(why) and why not in self._was_urgent
        self._was_urgent.add(why)

    def facts(self) -> LearningRateFacts:
        self.urgent, found = False, self._found
        bases = [float(g.get("initial_lr", 0.0)) for o in self._optimizers for g in o.param_groups]
        found.base = max(bases, default=0.0)
        found.schedulers = tuple(each.found for each in self._schedulers.values() if self._is_seen(each))
        return found

    def _is_seen(self, each: _Scheduler) -> bool:
        """Completes the facts of a scheduler. Returns True if its optimizer is watched, or has never stepped."""
        trained, found = {id(p) for root in self._roots for p in root.parameters()}, each.found
        found.parts = tuple(map(_part, _parts(each.scheduler)))
        found.shares = any(id(p) in trained for p in owned_by(each.optimizer))
        is_late = self._found.steps >= (2 if found.shares else MIN_STEPS_BEFORE_STRAY) and found.calls >= 2
        stepped = [o for o in self._optimizers if id(o) in self._stepped]
        # an optimizer that shares groups with a stepped one, such as its wrapper, is not stray
        found.is_stray = is_late and not any(share_groups(each.optimizer, o) for o in stepped)
        found.is_stray = found.is_stray and id(each.optimizer) not in self._stepped
        return found.is_stray or any(share_groups(each.optimizer, o) for o in self._optimizers)


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def _parts(scheduler: object) -> list[object]:
    """Returns the scheduler and the schedulers inside it."""
    inner = getattr(scheduler, "_schedulers", None)
    return [scheduler, *(part for each in inner for part in _parts(each))] if isinstance(inner, list) else [scheduler]


def _is_past_its_end(each: _Scheduler) -> bool:
    return any(getattr(part, "last_epoch", 0) > getattr(part, "T_max", math.inf) for part in _parts(each.scheduler))


def _part(scheduler: Any) -> PartFacts:
    classes = [c for c in type(scheduler).__mro__ if c.__module__.startswith("torch.optim")] or [type(scheduler)]
    numbers = {name: getattr(scheduler, name, None) for name in NUMERIC_ATTRIBUTES}
    mode, milestones = getattr(scheduler, "mode", ""), getattr(scheduler, "milestones", None)
    last = getattr(scheduler, "last_epoch", 0)
    return PartFacts(
        kind=classes[0].__name__,
        last_epoch=int(last) if isinstance(last, int | float) else 0,
        mode=mode if isinstance(mode, str) else "",
        milestones=tuple(sorted(milestones)) if isinstance(milestones, dict) else (),
        **{name: float(value) for name, value in numbers.items() if isinstance(value, int | float)},
    )
