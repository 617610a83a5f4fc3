"""What the learning rate does, and how often each scheduler is stepped for an optimizer step."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from torch import Tensor
from torch.optim import lr_scheduler

from trainwright.recorder.probes import Probe, WatchedObjects, probe
from trainwright.recorder.program import RecordedStep

KEPT = 64
FACTS = (
    "last_epoch", "T_max", "T_0", "total_steps", "total_iters", "step_size", "gamma", "base_lrs", "mode", "patience",
    "best", "num_bad_epochs", "eta_min",
)  # fmt: skip


class _Heard:
    """One scheduler: how it was stepped between two optimizer steps."""

    def __init__(self, scheduler: Any, given: bool, window: int) -> None:
        self.scheduler, self.given, self.since = scheduler, given, window
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
    """Also hears schedulers that were not given to the watch. ``urgent``: a cosine has begun to climb, or lr fell."""

    name = "schedule"

    def __init__(self, watched: WatchedObjects) -> None:
        self._optimizers = watched.subject.optimizers
        self._heard = {id(s): _Heard(s, True, 0) for s in watched.schedulers if _is_ours(s, self._optimizers)}
        self._steps = self._backwards = self._epochs = 0
        self._length: int | None = None
        self._changes: deque[list[float]] = deque(maxlen=KEPT)
        self._peak, self._peak_step, self._lowest, self._zero_steps = 0.0, 0, math.inf, 0
        self._exhausted: int | None = None
        self._window_losses: deque[Tensor] = deque(maxlen=512)
        self._warned: set[str] = set()

    def on_epoch(self, loader: Any, iterator: Any) -> None:
        if self._length is None or _length(loader) == self._length:
            self._epochs += 1
            self._length = self._length or _length(loader)

    def on_backward(self, losses: tuple[Tensor, ...], how: dict[str, Any]) -> None:
        self._backwards += 1
        for heard in self._heard.values():
            heard.run = 0

    def _of(self, scheduler: Any) -> _Heard | None:
        """What is known of it; None where it steers another optimizer."""
        if id(scheduler) not in self._heard and _is_ours(scheduler, self._optimizers):
            self._heard[id(scheduler)] = _Heard(scheduler, False, self._steps)
        return self._heard.get(id(scheduler))

    def on_schedule(self, scheduler: Any) -> None:
        if (heard := self._of(scheduler)) is not None:
            heard.step()

    def on_metric(self, scheduler: Any, metric: Any) -> None:
        heard = self._of(scheduler)
        if heard is not None and isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):  # others are given an epoch
            lr = max(float(group["lr"]) for group in scheduler.optimizer.param_groups)
            heard.metrics.append([self._steps, float(metric), self._mean_loss(), lr])

    def _mean_loss(self) -> float:
        """Of the training since it was last asked."""
        losses = list(self._window_losses)
        self._window_losses.clear()
        return sum(float(each) for each in losses) / len(losses) if losses else math.nan

    def on_closed(self, segment: RecordedStep) -> None:
        self._steps += 1
        for heard in self._heard.values():
            heard.close(self._backwards)
        self._backwards = 0
        if segment.losses and segment.losses[0].numel() == 1:
            self._window_losses.append(segment.losses[0])
        self._note_lr(max((float(g["lr"]) for o in self._optimizers for g in o.param_groups), default=0.0))

    def _note_lr(self, lr: float) -> None:
        before = self._changes[-1][1] if self._changes else None
        self._zero_steps += lr == 0.0
        if lr > self._peak:
            self._peak, self._peak_step, self._exhausted = lr, self._steps, None
        if lr < 1e-3 * self._peak and self._exhausted is None:
            self._exhausted = self._steps
        elif lr >= 1e-3 * self._peak:
            self._exhausted = None
        if lr == before:
            return
        self._changes.append([self._steps, lr])
        if before is not None and lr < before:
            self._cry("fell")
        elif before is not None and any(_is_past_its_end(h.scheduler) for h in self._heard.values()):
            self._cry("climbs")

    def _cry(self, why: str) -> None:
        """Once in a run: what a schedule does first is what its fault shows in."""
        if why not in self._warned:
            self._warned.add(why)
            self.urgent = True

    def values(self) -> dict[str, Any]:
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
            "schedulers": [_told(each) for each in self._heard.values()],
        }


def _is_ours(scheduler: Any, optimizers: list[Any]) -> bool:
    known = isinstance(scheduler, lr_scheduler.LRScheduler | lr_scheduler.ReduceLROnPlateau)
    return known and any(scheduler.optimizer is each for each in optimizers)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _parts(scheduler: Any) -> list[Any]:
    """It and those that it steps."""
    inner = getattr(scheduler, "_schedulers", None)
    return [scheduler, *(part for each in inner for part in _parts(each))] if isinstance(inner, list) else [scheduler]


def _is_past_its_end(scheduler: Any) -> bool:
    return any(getattr(part, "last_epoch", 0) > getattr(part, "T_max", math.inf) for part in _parts(scheduler))


def _told(heard: _Heard) -> dict[str, Any]:
    return {
        "given": heard.given,
        "since": heard.since,
        "calls": heard.calls,
        "windows": [list(each) for each in heard.windows],
        "metrics": [list(each) for each in heard.metrics],
        "parts": [_facts(part) for part in _parts(heard.scheduler)],
    }


def _facts(scheduler: Any) -> dict[str, Any]:
    classes = [c for c in type(scheduler).__mro__ if c.__module__.startswith("torch.optim")] or [type(scheduler)]
    told: dict[str, Any] = {"class": classes[0].__name__}
    for name in FACTS:
        value = getattr(scheduler, name, None)
        if isinstance(value, int | float | str):
            told[name] = value
        elif isinstance(value, list | tuple):
            told[name] = [float(each) for each in value if isinstance(each, int | float)]
    if isinstance(milestones := getattr(scheduler, "milestones", None), dict):
        told["milestones"] = sorted(milestones)
    return told
