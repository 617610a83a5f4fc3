"""The time that examinations may take: a fraction of the training time so far."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Examine = Literal["budget", "all", "listen"]
"""How much is examined: what the budget allows, or everything."""
LIFTED_BY = "TRAINWRIGHT_EXAMINE"
"""The environment variable that lifts the budget of every run: ``TRAINWRIGHT_EXAMINE=all``."""
FRACTION = 0.03
"""Of the training time so far: the most that examinations and snapshots may take while a run goes on."""
END_FRACTION, END_S = 0.05, 3.0
"""The same for all of a run, its end included; and the most seconds that the examination at the end may take."""
REPEATED_FRACTION = 0.005
"""Of the training time: experiments that are repeated, where none is left that has not run yet."""
FREE_S = 0.2
"""Seconds that every run may spend, however short it is: about 30 replays of a small model. Until the end each
examination may take half of what is left of them.
"""
EVIDENCE_S = 1.0
"""Seconds that a run may spend beyond that where something was seen: on what a check requests for an examined step, and
on remedies of findings.
"""
INCIDENT_S, INCIDENT_STEPS = 3.0, 8
"""The first step that is not finite may be examined for so many seconds, or as long as so many steps, beyond that."""
RECENT_STEPS = 8
"""The fastest of so many steps is the time of a step: others may contain an evaluation."""
COLD_EXAMINATIONS_S = 0.3
"""Seconds that the examinations of a run of 0.3 s took beyond their budget on two CPU cores, its code being cold."""
COLD_S, COLD_TIMES = 0.05, 4
"""The first step of a run takes so many seconds more than later ones, or so many times as long: its code is cold."""


class ExaminationBudget:
    """Counts seconds of training and seconds of examinations.

    On a CPU these are processor seconds of the thread that trains: what is examined does not depend on what else the
    machine does. On other devices they are seconds of wall time. ``examine="all"``, or the environment, lifts the
    limit; everything is counted as well. ``clock`` returns seconds.
    """

    def __init__(
        self, device: torch.device, examine: Examine = "budget", clock: Callable[[], float] | None = None
    ) -> None:
        self.clock = clock or (time.thread_time if device.type == "cpu" else time.perf_counter)
        self.is_lifted = "all" in (examine, os.environ.get(LIFTED_BY))
        self.spent_s = self.spent_on_evidence_s = self._trained_s = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._steps = 0  # since the clock was read last
        self._wall_s, self._examines_since_s = 0.0, math.nan  # of examinations; of the one that goes on
        self.has_replayed_incident = False
        self.begin()

    def begin(self) -> None:
        """The run begins now."""
        self._since_s, self._begin_s = self.clock(), time.perf_counter()

    def train(self) -> None:
        """A step is over. The clock is not read: that takes longer than all else here."""
        self._steps += 1

    def _count(self) -> None:
        """Count the training since the clock was read last."""
        if self._steps:
            now_s, steps, self._steps = self.clock(), self._steps, 0
            step_s = (now_s - self._since_s) / steps
            is_first = not self._recent
            self._recent.append(max(step_s - COLD_S, step_s / COLD_TIMES) if is_first else step_s)
            self._trained_s += now_s - self._since_s
            self._since_s = now_s

    @property
    def trained_s(self) -> float:
        """Seconds of training so far."""
        self._count()
        return self._trained_s

    @property
    def step_s(self) -> float:
        """Seconds that a step takes, when the clock was read last. 0 before the first one."""
        return min(self._recent, default=0.0)

    @property
    def examined_wall_s(self) -> float:
        """Wall time of examinations so far, with the one that goes on."""
        since_s = time.perf_counter() - self._examines_since_s
        return self._wall_s + (0.0 if math.isnan(since_s) else since_s)

    @property
    def trained_wall_s(self) -> float:
        """Wall time since the run began, without examinations."""
        return time.perf_counter() - self._begin_s - self.examined_wall_s

    @property
    def left_s(self) -> float:
        """Seconds that an examination may take now; below 0 where too many were taken."""
        if self.is_lifted:
            return math.inf
        return max(self._free_s / 2, FRACTION * self.trained_s - self.spent_s)

    @property
    def _free_s(self) -> float:
        return FREE_S - (self.spent_s - self.spent_on_evidence_s)

    @property
    def left_for_evidence_s(self) -> float:
        """Seconds that may be spent now, beyond all others, where something was seen."""
        return EVIDENCE_S - self.spent_on_evidence_s

    @property
    def left_at_end_s(self) -> float:
        """Seconds that the examination at the end of the run may take: at most END_S of wall time."""
        if self.is_lifted:
            return math.inf
        took_s = time.perf_counter() - self._begin_s
        share = min(1.0, (self.trained_s + self.spent_s) / took_s) if took_s > 0 else 1.0  # of the processor
        return min(share * END_S, max(self._free_s, END_FRACTION * self.trained_s - self.spent_s))

    @property
    def left_for_incident_s(self) -> float:
        """Seconds for a step that is not finite: until one was replayed, more than the budget has."""
        if self.has_replayed_incident:
            return self.left_s
        return max(self.left_s, INCIDENT_S, INCIDENT_STEPS * self.step_s)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """A context without the limit. The time that is spent inside counts as wall time, and not in the budget."""
        before = self.is_lifted, self.spent_s, self.spent_on_evidence_s
        self.is_lifted = True
        try:
            yield
        finally:
            self.is_lifted, self.spent_s, self.spent_on_evidence_s = before

    @contextmanager
    def spending(self) -> Iterator[None]:
        """A context whose time is spent on an examination, and not on training."""
        self._count()
        begin_s = self.clock()
        self._examines_since_s = time.perf_counter()
        try:
            yield
        finally:
            spent_s = self.clock() - begin_s
            self._wall_s, self._examines_since_s = self.examined_wall_s, math.nan
            self.spent_s += spent_s
            self._since_s += spent_s


def predicted_s(training_s: float) -> float:
    """The most seconds that the examinations of a run may take that trains for ``training_s``."""
    return max(FREE_S, END_FRACTION * training_s)


def predicted_from_start_s(training_s: float) -> float:
    """The most seconds of a run that has not begun: its code runs for the first time, which takes longer."""
    return COLD_EXAMINATIONS_S + predicted_s(training_s)


def predicted_end_s(training_s: float) -> float:
    """The most seconds that the examination at its end may take."""
    return min(END_S, max(FREE_S, END_FRACTION * training_s))
