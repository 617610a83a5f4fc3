"""The course of the learning rate, and how often each scheduler is stepped between two optimizer steps."""

from __future__ import annotations

import math
from collections import deque
from typing import SupportsFloat

from torch import Tensor
from torch.optim import Optimizer, lr_scheduler

from trainwright.recorder.datasets import length_of
from trainwright.recorder.optimizers import share_groups
from trainwright.recorder.probes import Probe, WatchedObjects, probe
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.user_types import Kwargs, Loader
from trainwright.runlog.json_values import Facts

KEPT = 64
FACTS = (
    "last_epoch", "T_max", "T_0", "total_steps", "total_iters", "step_size", "gamma", "base_lrs", "mode", "patience",
    "best", "num_bad_epochs", "eta_min",
)  # fmt: skip


class _SchedulerCalls:
    """How often a scheduler was stepped. A window lies between two optimizer steps; ``run`` counts calls in a row."""

    def __init__(self, scheduler: object, declared: bool, since: int) -> None:
        self.scheduler, self.declared, self.since = scheduler, declared, since
        self.calls = self.in_window = self.run = self.longest = 0
        self.windows: deque[list[int]] = deque(maxlen=8)
        self.metrics: deque[list[float]] = deque(maxlen=KEPT)

    def step(self) -> None:
        self.calls += 1
        self.in_window += 1
        self.run += 1
        self.longest = max(self.longest, self.run)

    def close(self, backwards: int) -> None:
        self.windows.append([self.in_window, backwards, self.longest])
        self.in_window = self.run = self.longest = 0


@probe
class ScheduleProbe(Probe):
    """Also records schedulers that the watch was not called with. ``urgent``: a cosine began to climb, or lr fell."""

    name = "schedule"

    def __init__(self, watched: WatchedObjects) -> None:
        self._optimizers = watched.subject.optimizers
        self._schedulers = {
            id(s): _SchedulerCalls(s, True, 0) for s in watched.schedulers if _is_ours(s, self._optimizers)
        }
        self._has_rates = any("lr" in group for o in self._optimizers for group in o.param_groups)
        self._steps = self._backwards = self._epochs = 0
        self._length: int | None = None
        self._changes: deque[list[float]] = deque(maxlen=KEPT)
        self._peak, self._peak_step, self._lowest, self._zero_steps = 0.0, 0, math.inf, 0
        self._exhausted: int | None = None
        self._window_losses: deque[Tensor] = deque(maxlen=512)
        self._warned: set[str] = set()

    def on_epoch(self, loader: Loader, iterator: object) -> None:
        if self._length is None or length_of(loader) == self._length:
            self._epochs += 1
            self._length = self._length or length_of(loader)

    def on_backward(self, losses: tuple[Tensor, ...], options: Kwargs) -> None:
        self._backwards += 1
        for calls in self._schedulers.values():
            calls.run = 0

    def _of(self, scheduler: object) -> _SchedulerCalls | None:
        """The calls of a scheduler; None where it belongs to another optimizer."""
        if id(scheduler) not in self._schedulers and _is_ours(scheduler, self._optimizers):
            self._schedulers[id(scheduler)] = _SchedulerCalls(scheduler, False, self._steps)
        return self._schedulers.get(id(scheduler))

    def on_schedule(self, scheduler: object) -> None:
        if (calls := self._of(scheduler)) is not None:
            calls.step()

    def on_metric(self, scheduler: object, metric: object) -> None:
        calls = self._of(scheduler)
        if calls is not None and isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):  # to others the epoch is passed
            lr = max(float(group["lr"]) for group in scheduler.optimizer.param_groups)
            calls.metrics.append([self._steps, _as_float(metric), self._mean_loss(), lr])

    def _mean_loss(self) -> float:
        """The mean loss of the training steps since the last call."""
        losses = list(self._window_losses)
        self._window_losses.clear()
        return sum(float(each) for each in losses) / len(losses) if losses else math.nan

    def on_closed(self, step: RecordedStep) -> None:
        self._steps += 1
        for calls in self._schedulers.values():
            calls.close(self._backwards)
        self._backwards = 0
        if step.losses:
            self._window_losses.append(step.losses[0])
        if self._has_rates:
            self._hear_rate(step)

    def _hear_rate(self, step: RecordedStep) -> None:
        groups = [] if step.is_told_late else [group for o in self._optimizers for group in o.param_groups]
        rates = [step.lr] if step.is_told_late else [float(group["lr"]) for group in groups if "lr" in group]
        lr = max(rates, default=0.0)
        self._zero_steps += lr == 0.0
        if not self._changes or lr != self._changes[-1][1]:
            self._note_lr(lr)

    def _note_lr(self, lr: float) -> None:
        """``lr`` is another than before."""
        before = self._changes[-1][1] if self._changes else None
        if lr > self._peak:
            self._peak, self._peak_step, self._exhausted = lr, self._steps, None
        if lr < 1e-3 * self._peak and self._exhausted is None:
            self._exhausted = self._steps
        elif lr >= 1e-3 * self._peak:
            self._exhausted = None
        self._changes.append([self._steps, lr])
        if before is not None and lr < before:
            self._warn("fell")
        elif before is not None and any(_is_past_its_end(h.scheduler) for h in self._schedulers.values()):
            self._warn("climbs")

    def _warn(self, why: str) -> None:
        """Makes the probe urgent, once in a run for each reason: the first change of a schedule shows its fault."""
        if why not in self._warned:
            self._warned.add(why)
            self.urgent = True

    def values(self) -> Facts:
        self.urgent = False
        attached = any("initial_lr" in group for o in self._optimizers for group in o.param_groups)
        return {
            "steps": self._steps,
            "epochs": self._epochs,
            "length": self._length,
            "lrs": [list(each) for each in self._changes],
            "peak": self._peak,
            "peak_step": self._peak_step,
            "zero_steps": self._zero_steps,
            "exhausted": self._exhausted,
            "attached": attached,
            "base": max(
                (float(g.get("initial_lr", 0.0)) for o in self._optimizers for g in o.param_groups), default=0.0
            ),
            "schedulers": [_facts_of(each) for each in self._schedulers.values()],
        }


def _is_ours(scheduler: object, optimizers: list[Optimizer]) -> bool:
    if not isinstance(scheduler, lr_scheduler.LRScheduler | lr_scheduler.ReduceLROnPlateau):
        return False
    return any(share_groups(scheduler.optimizer, each) for each in optimizers)


def _parts(scheduler: object) -> list[object]:
    """The scheduler and those that it steps."""
    inner = getattr(scheduler, "_schedulers", None)
    return [scheduler, *(part for each in inner for part in _parts(each))] if isinstance(inner, list) else [scheduler]


def _as_float(metric: object) -> float:
    return float(metric) if isinstance(metric, SupportsFloat) else math.nan


def _is_past_its_end(scheduler: object) -> bool:
    return any(getattr(part, "last_epoch", 0) > getattr(part, "T_max", math.inf) for part in _parts(scheduler))


def _facts_of(calls: _SchedulerCalls) -> Facts:
    return {
        "given": calls.declared,
        "since": calls.since,
        "calls": calls.calls,
        "windows": [list(each) for each in calls.windows],
        "metrics": [list(each) for each in calls.metrics],
        "parts": [_facts(part) for part in _parts(calls.scheduler)],
    }


def _facts(scheduler: object) -> Facts:
    classes = [c for c in type(scheduler).__mro__ if c.__module__.startswith("torch.optim")] or [type(scheduler)]
    facts: Facts = {"class": classes[0].__name__}
    for name in FACTS:
        value = getattr(scheduler, name, None)
        if isinstance(value, int | float | str):
            facts[name] = value
        elif isinstance(value, list | tuple):
            facts[name] = [float(each) for each in value if isinstance(each, int | float)]
    if isinstance(milestones := getattr(scheduler, "milestones", None), dict):
        facts["milestones"] = sorted(milestones)
    return facts
