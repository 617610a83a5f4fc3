"""A profile of a loop, from the marks between its steps: first at full speed, then traced, then counted."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from trainwright.profiling.counting import StepCounter
from trainwright.profiling.facts import PHASES, Hot, ProfileFacts
from trainwright.profiling.sampler import HostSampler
from trainwright.profiling.stack import HostPlace
from trainwright.profiling.tracing import StepTracer

T = TypeVar("T")

WARMUP_STEPS = 10
"""Steps before the first timed one: kernels are chosen, workers started, moments made."""
MIN_STEPS = 10
MAX_STEPS = 400
TIMED_S = 1.0
"""Timing at full speed lasts until at least MIN_STEPS steps and TIMED_S seconds, or MAX_STEPS steps."""
TRACED_STEPS = 3
MIN_OCCASIONAL_FRACTION = 0.3
"""Minimum fraction of a step that an evaluation, a save or an examination takes to count as one."""
MIN_PLACE_FRACTION = 0.02
"""Minimum fraction of a step at which a place is kept."""


class ProfileSession:
    """Profiles a loop whose training thread calls ``mark`` after each step.

    Nothing is instrumented before ``after`` steps and once it is ``done``.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        *,
        trace: Path | None,
        after: int = WARMUP_STEPS,
        for_s: float = TIMED_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._roots = roots
        self._trace = trace
        self._clock = clock
        self._after, self._for_s = after, for_s
        self._marks = 0
        self._begin_s = 0.0
        self._steps: list[tuple[float, Counter[HostPlace]]] = []
        self._sampler: HostSampler | None = None
        self._tracer: StepTracer | None = None
        self._counter: StepCounter | None = None
        self._traced = 0
        self._next = self._wait
        self.failed: dict[str, str] = {}
        self.parts: dict[str, Any] = {}

    @property
    def done(self) -> bool:
        """True if everything is measured."""
        return self._next == self._rest

    def mark(self) -> None:
        """Mark the end of a step."""
        self._next()

    def _wait(self) -> None:
        self._marks += 1
        if self._marks >= self._after:
            self._sampler = HostSampler(threading.get_ident())
            self._sampler.start()
            self._begin_s = self._clock()
            self._next = self._time

    def _time(self) -> None:
        assert self._sampler is not None
        now_s = self._clock()
        self._steps.append((now_s - self._begin_s, self._sampler.take()))
        self._begin_s = now_s
        total_s = sum(seconds for seconds, _ in self._steps)
        if len(self._steps) >= (MIN_STEPS if total_s >= self._for_s else MAX_STEPS) or self._is_slow(total_s):
            self._sampler.close()
            self._sampler = None
            self._next = self._trace_step
            self._tracer = self._try("trace", lambda: StepTracer(self._roots))

    def _is_slow(self, total_s: float) -> bool:
        """Return True for steps that take seconds, of which three are enough."""
        return len(self._steps) >= 3 and total_s > 10 * self._for_s

    def _trace_step(self) -> None:
        self._traced += 1
        if self._tracer is None or self._traced >= TRACED_STEPS:
            self._read_trace()
            self._counter = self._try("count", lambda: StepCounter(self._roots))
            if self._counter is not None:
                self._counter.__enter__()  # type: ignore[no-untyped-call]
            self._next = self._count

    def _read_trace(self) -> None:
        tracer, self._tracer = self._tracer, None
        if tracer is None:
            return
        seen = self._try("trace", lambda: tracer.close(self._traced, self._trace))
        if seen is not None:
            for name in ("operators", "modules", "memory", "busy"):
                self.parts[name] = self._try(name, getattr(seen, name))
            self.parts["trace"] = None if self._trace is None else self._trace.name

    def _count(self) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._counter.close()
            self.parts |= {"work": self._counter.work(), "syncs": self._counter.syncs()}
            self._counter = None
        self._next = self._rest

    def _rest(self) -> None: ...

    def _try(self, name: str, action: Callable[[], T]) -> T | None:
        """Return the result of ``action``. A failure is recorded, and that part is missing from the profile."""
        try:
            return action()
        except Exception as error:
            self.failed[name] = f"{type(error).__name__}: {str(error)[:200]}"
            return None

    def close(self) -> None:
        """End the profile, before or after everything was measured. Must be called on the thread of ``mark``."""
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None
        self._read_trace()
        if self._counter is not None:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._counter.close()
            self._counter = None
        self._next = self._rest

    def facts(self, *, device: str, precision: str, **known: Any) -> ProfileFacts | None:
        """Return the measurements; None if no step was timed. ``known`` are fields that the caller provides."""
        steps = without_occasional_steps([_without_experiments(*step) for step in self._steps])
        if not steps:
            return None
        step_s = sum(seconds for seconds, _ in steps) / len(steps)
        places = Counter[HostPlace]()
        for _, seen in steps:
            places.update(seen)
        seen_s = sum(places.values()) or 1.0
        scale = step_s / seen_s  # the sampler begins and ends within a step
        phases = dict.fromkeys(PHASES, 0.0)
        for place, seconds in places.items():
            phases[place.phase] += seconds * scale
        hot = tuple(
            Hot(place.phase, place.label, place.site, seconds * scale)
            for place, seconds in places.most_common(MAX_STEPS)
            if seconds * scale > MIN_PLACE_FRACTION * step_s
        )
        parts = {name: part for name, part in self.parts.items() if part is not None}
        left_out = len(self._steps) - len(steps)
        return ProfileFacts(
            device, precision, len(steps), step_s, phases, hot, left_out=left_out, failed=self.failed, **parts, **known
        )


def without_occasional_steps(steps: list[tuple[float, Counter[HostPlace]]]) -> list[tuple[float, Counter[HostPlace]]]:
    """Return the steps without the few that an occasional evaluation, save or examination followed.

    Among these few steps it would count for more than in the run. What follows every other step is usual.
    """
    rare = [_has_occasional(places) for _, places in steps]
    return steps if 2 * sum(rare) >= len(steps) else [step for step, is_rare in zip(steps, rare) if not is_rare]


def _without_experiments(seconds: float, places: Counter[HostPlace]) -> tuple[float, Counter[HostPlace]]:
    """Return a step without experiments on replays: their budget covers the run, and most of it is spent early."""
    looks_s = sum(each for place, each in places.items() if place.phase == "looks")
    rest = Counter({place: each for place, each in places.items() if place.phase != "looks"})
    return max(0.0, seconds - looks_s), rest


def _has_occasional(places: Counter[HostPlace]) -> bool:
    total_s = sum(places.values())
    return any(
        sum(seconds for place, seconds in places.items() if place.phase == phase) > MIN_OCCASIONAL_FRACTION * total_s
        for phase in ("evaluation", "saving", "looking")
    )
