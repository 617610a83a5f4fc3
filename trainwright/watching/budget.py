"""The time budget of examinations: a fraction of the training time so far."""

from __future__ import annotations

import gc
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Examine = Literal["budget", "all", "listen"]
"""Extent of examinations: within the budget, everything, or no replays."""
DOCTOR_VARIABLE = "TRAINWRIGHT_DOCTOR"
"""Environment variable: with ``off`` runs train without the doctor unless they set ``log.doctor`` or ``log.examine``.

A test suite that trains many short runs takes a fraction of the time with it. ``tw.watch`` ignores it.
"""
LIFTED_BY = "TRAINWRIGHT_EXAMINE"
"""Environment variable that lifts the budget of every run: ``TRAINWRIGHT_EXAMINE=all``."""
FRACTION, LATER_FRACTION = 0.03, 0.01
"""Maximum fractions for examinations and snapshots during a run: of the first EARLY_S of training, and of the rest.

After EARLY_S nearly all experiments have run. A run of ten minutes is examined for at most 1.8 % of its time.
"""
EARLY_S = 100.0
END_FRACTION, END_S = 0.05, 3.0
"""The same fraction for the full run including its end, and the maximum seconds of the final examination."""
REPEATED_FRACTION = 0.005
"""Fraction of the training time for repeated experiments, once every experiment has run."""
FREE_S = 0.2
"""Seconds that every run may spend, however short it is: about 30 replays of a small model.

Before the end, each examination may use half of the remainder.
"""
EVIDENCE_S = 1.0
"""Additional seconds after something was detected: for experiments that a check requests, and for remedies."""
INCIDENT_S, INCIDENT_STEPS = 3.0, 8
"""The examination of the first non-finite step may take these seconds, or this multiple of the step time."""
RECENT_STEPS = 8
"""Readings of the clock over which the step time is the minimum, because some may contain an evaluation."""
COLD_EXAMINATIONS_S = 0.3
"""Seconds by which the examinations of a run of 0.3 s exceeded their budget on two CPU cores, before warm-up."""
FULL_COLLECTION = 2
"""The oldest generation of Python's garbage collector."""
COLD_S, COLD_TIMES = 0.05, 4
"""The time of the first step of a run counts without COLD_S of warm-up, but at least 1 / COLD_TIMES of it counts."""


class ClockWithoutCollections:
    """A clock of one thread that stands still during full garbage collections.

    They take up to 0.3 s where large packages are imported, and come at any time. Without this, one of them would use
    up the budget of a short run, and stop the experiment in which it happens.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._thread = clock, threading.get_ident()
        self._collected_s, self._begin_s = 0.0, math.nan
        known = weakref.ref(self)

        def on_collection(phase: str, info: dict[str, int]) -> None:
            if (itself := known()) is None:
                gc.callbacks.remove(on_collection)
            elif info["generation"] == FULL_COLLECTION and threading.get_ident() == itself._thread:
                itself._note(phase)

        gc.callbacks.append(on_collection)

    def __call__(self) -> float:
        return self._clock() - self._collected_s

    def _note(self, phase: str) -> None:
        if phase == "start":
            self._begin_s = self._clock()
        elif not math.isnan(self._begin_s):
            self._collected_s += self._clock() - self._begin_s
            self._begin_s = math.nan


class ExaminationBudget:
    """Counts seconds of training and of examinations.

    On a CPU these are processor seconds of the training thread, so that other load on the machine does not affect what
    is examined. On other devices they are wall time. ``examine="all"``, or the environment variable, lifts the limit,
    but time is still counted. ``clock`` returns seconds.
    """

    def __init__(
        self, device: torch.device, examine: Examine = "budget", clock: Callable[[], float] | None = None
    ) -> None:
        self.clock = clock or ClockWithoutCollections(time.thread_time if device.type == "cpu" else time.perf_counter)
        self.is_lifted = "all" in (examine, os.environ.get(LIFTED_BY))
        self.spent_s = self.spent_on_evidence_s = self._trained_s = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._steps = 0  # since the last reading of the clock
        self.has_replayed_incident = False
        self.begin()

    def begin(self) -> None:
        """Starts counting."""
        self._since_s, self._begin_s = self.clock(), time.perf_counter()

    def train(self) -> None:
        """Counts a step without reading the clock, which would take longer than everything else here."""
        self._steps += 1

    def _count(self) -> None:
        """Counts the training since the last reading of the clock."""
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
        """Minimum seconds per step at the last readings of the clock; 0 before the first reading."""
        return min(self._recent, default=0.0)

    @property
    def left_s(self) -> float:
        """Seconds that an examination may take now; negative if the budget is exceeded."""
        if self.is_lifted:
            return math.inf
        return max(self._free_s / 2, _earned_s(self.trained_s) - self._spent_s)

    @property
    def _spent_s(self) -> float:
        """Seconds of examinations so far, without those on evidence, which are additional."""
        return self.spent_s - self.spent_on_evidence_s

    @property
    def _free_s(self) -> float:
        return FREE_S - self._spent_s

    @property
    def left_for_evidence_s(self) -> float:
        """Seconds left of the additional ones for evidence and remedies."""
        return EVIDENCE_S - self.spent_on_evidence_s

    @property
    def left_at_end_s(self) -> float:
        """Seconds that the final examination may take: at most END_S of wall time."""
        if self.is_lifted:
            return math.inf
        took_s = time.perf_counter() - self._begin_s
        share = min(1.0, (self.trained_s + self.spent_s) / took_s) if took_s > 0 else 1.0  # fraction of the processor
        return min(share * END_S, max(self._free_s, END_FRACTION * self.trained_s - self._spent_s))

    @property
    def left_for_incident_s(self) -> float:
        """Seconds for a non-finite step. Until one was replayed, this may exceed the budget."""
        if self.has_replayed_incident:
            return self.left_s
        return max(self.left_s, INCIDENT_S, INCIDENT_STEPS * self.step_s)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Context without the limit. The time inside does not count."""
        before = self.is_lifted, self.spent_s, self.spent_on_evidence_s
        self.is_lifted = True
        try:
            yield
        finally:
            self.is_lifted, self.spent_s, self.spent_on_evidence_s = before

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Context whose time counts as examination instead of training."""
        self._count()
        begin_s = self.clock()
        try:
            yield
        finally:
            spent_s = self.clock() - begin_s
            self.spent_s += spent_s
            self._since_s += spent_s


def predicted_s(training_s: float) -> float:
    """Returns the maximum seconds of examinations in a run with ``training_s`` seconds of training."""
    return max(FREE_S, min(END_FRACTION * training_s, _earned_s(training_s) + END_S))


def _earned_s(training_s: float) -> float:
    return FRACTION * min(training_s, EARLY_S) + LATER_FRACTION * max(0.0, training_s - EARLY_S)


def predicted_from_start_s(training_s: float) -> float:
    """Returns the maximum seconds of examinations, predicted before the run begins, including warm-up."""
    return COLD_EXAMINATIONS_S + predicted_s(training_s)


def predicted_end_s(training_s: float) -> float:
    """Returns the maximum seconds of the final examination."""
    return min(END_S, max(FREE_S, END_FRACTION * training_s))
