"""The rate that each update uses against that which its scheduler has set, and when the scheduler is stepped."""

from __future__ import annotations

from collections import Counter

import torch
from torch.optim import Optimizer

from trainwright.doctor.program.facts import RateFacts, RatesFacts
from trainwright.recorder.optimizers import same_optimizer
from trainwright.recorder.probes import Probe
from trainwright.recorder.user_types import Args
from trainwright.runlog.json_values import Facts, strict


class _Schedule:
    """What is seen of one scheduler, from its first step on."""

    def __init__(self, scheduler: object) -> None:
        self.scheduler = scheduler
        self.updates = self.calls = self.off = self.off_in_a_row = self.followed = self.off_since = 0
        self._since, self._used = 0, list[float]()
        self.seen = self.said = 0.0
        self.gaps: Counter[int] = Counter()

    def stepped(self) -> None:
        self.calls += 1
        if self.calls > 1:
            self.gaps[self._since] += 1
        self._since = 0

    def updated(self, step: int, used: list[float], *, is_last: bool) -> None:
        """An update was made with these rates. ``is_last``: no other scheduler of the optimizer stepped since."""
        self.updates, self._since = self.updates + 1, self._since + 1
        said = [float(rate) for rate in getattr(self.scheduler, "_last_lr", ())]
        before, self._used = self._used, used
        if not is_last or len(said) != len(used):
            return
        off = [(a, b) for a, b in zip(used, said) if abs(a - b) > 1e-6 * max(abs(a), abs(b))]
        self.off_in_a_row = self.off_in_a_row + 1 if off else 0
        self.followed += not off and bool(before) and used != before
        if off:
            self.off += 1
            self.off_since = self.off_since or step
            self.seen, self.said = off[0]

    def facts(self) -> RateFacts:
        return RateFacts(
            kind=type(self.scheduler).__name__,
            updates=self.updates,
            calls=self.calls,
            off=self.off,
            off_in_a_row=self.off_in_a_row,
            followed=self.followed,
            off_since=self.off_since,
            seen=self.seen,
            said=self.said,
            gaps=tuple(sorted(self.gaps.items()))[:16],
        )


class RatesProbe(Probe):
    """Hears schedulers and updates; a rate on a GPU is not read."""

    name = RatesFacts.experiment

    def __init__(self) -> None:
        self._schedules: dict[int, _Schedule] = {}
        self._of: dict[int, list[_Schedule]] = {}
        self._last: dict[int, _Schedule] = {}
        self._updates = 0

    def on_schedule(self, scheduler: object) -> None:
        optimizer = same_optimizer(getattr(scheduler, "optimizer", None))
        if optimizer is None:
            return
        schedule = self._schedules.get(id(scheduler))
        if schedule is None:
            schedule = self._schedules[id(scheduler)] = _Schedule(scheduler)
            self._of.setdefault(id(optimizer), []).append(schedule)
        schedule.stepped()
        self._last[id(optimizer)] = schedule

    def on_step(self, optimizer: Optimizer, args: Args) -> None:
        self._updates += 1
        schedules = self._of.get(id(optimizer))
        if schedules is None:
            return
        rates = [group["lr"] for group in optimizer.param_groups]
        if any(isinstance(rate, torch.Tensor) and rate.device.type != "cpu" for rate in rates):
            return
        used = [float(rate) for rate in rates]
        for schedule in schedules:
            schedule.updated(self._updates, used, is_last=self._last[id(optimizer)] is schedule)

    def values(self) -> Facts | None:
        if not self._updates:
            return None
        return dict(strict(vars(RatesFacts(tuple(each.facts() for each in self._schedules.values())))))
