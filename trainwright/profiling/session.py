"""Profiles a loop that marks its steps: some steps run at full speed, then some are traced, then one is counted."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.plan.call_trace import Phase, Work
from trainwright.plan.trace.fake_tensors import in_backward
from trainwright.plan.trace.operator_call import OpArgs, OperatorCall, OpKwargs, OpResult, WorkLog, tensors_in
from trainwright.plan.trace.tracker import ModulePaths
from trainwright.profiling.tracing import HostPlace, StepTracer, place_of
from trainwright.profiling.verdict import PHASES, HostSync, Hot, ProfileFacts

T = TypeVar("T")

WARMUP_STEPS = 10
"""Steps before the first timed one. They choose kernels, start workers and allocate optimizer state."""
MIN_STEPS = 10
MAX_STEPS = 400
TIMED_S = 1.0
"""Timing at full speed lasts until at least MIN_STEPS steps and TIMED_S seconds, or MAX_STEPS steps."""
TRACED_STEPS = 3
MIN_OCCASIONAL_FRACTION = 0.3
"""An evaluation, a save or an examination is attributed to a step if it takes more than this fraction of the step."""
MIN_PLACE_FRACTION = 0.02
"""Places that take a smaller fraction of a step are left out."""


class ProfileSession:
    """Profiles a loop whose training thread calls ``mark`` after each step.

    Nothing is instrumented during the first ``after`` steps, and once the session is ``done``. ``for_s`` replaces
    ``TIMED_S``. ``trace`` is the file for the trace; None: it is not written.
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
        takes_seconds = len(self._steps) >= 3 and total_s > 10 * self._for_s  # three timed steps are enough then
        if len(self._steps) >= (MIN_STEPS if total_s >= self._for_s else MAX_STEPS) or takes_seconds:
            self._close_sampler()
            self._next = self._trace_step
            self._tracer = self._try("trace", lambda: StepTracer(self._roots))

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
            for name in ("operators", "modules", "memory", "busy", "kernels"):
                self.parts[name] = self._try(name, getattr(seen, name))
            self.parts["trace"] = None if self._trace is None else self._trace.name

    def _count(self) -> None:
        if self._counter is not None:
            self.parts |= {"work": self._counter.work(), "syncs": self._counter.syncs()}
        self._close_counter()
        self._next = self._rest

    def _close_sampler(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None

    def _close_counter(self) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._counter.close()
            self._counter = None

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
        self._close_sampler()
        self._read_trace()
        self._close_counter()
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
    """Return the steps without those that an occasional evaluation, save or examination followed.

    Among so few timed steps, the fraction of an occasional event would be larger than in the run. If at least half of
    the steps have such an event, all steps are kept.
    """
    rare = [_has_occasional(places) for _, places in steps]
    return steps if 2 * sum(rare) >= len(steps) else [step for step, is_rare in zip(steps, rare) if not is_rare]


def _without_experiments(seconds: float, places: Counter[HostPlace]) -> tuple[float, Counter[HostPlace]]:
    """Leave out the time of experiments on replays, which are frequent early in a run and would bias the profile."""
    replaying_s = sum(each for place, each in places.items() if place.phase == "replaying")
    rest = Counter({place: each for place, each in places.items() if place.phase != "replaying"})
    return max(0.0, seconds - replaying_s), rest


def _has_occasional(places: Counter[HostPlace]) -> bool:
    total_s = sum(places.values())
    return any(
        sum(seconds for place, seconds in places.items() if place.phase == phase) > MIN_OCCASIONAL_FRACTION * total_s
        for phase in ("evaluation", "saving", "looking")
    )


_SYNCHRONIZING = {"_local_scalar_dense": "reads a value", "nonzero": "has an output size that depends on values"}
_SYNCHRONIZING |= dict.fromkeys(("masked_select", "_unique2", "unique_consecutive"), _SYNCHRONIZING["nonzero"])
"""Operators whose result the host waits for, because it needs a value."""


class StepCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that counts operators and host syncs of one step, without those of an evaluation or a save."""

    is_trainwright_mode = True  # the recorder is inactive in a user's mode; this marks the mode as Trainwright's

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._paths = [ModulePaths(root) for root in roots]
        self._work = WorkLog()
        self._syncs = Counter[tuple[str, str, str]]()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: OpArgs = (), kwargs: OpKwargs | None = None
    ) -> OpResult:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim":
            return result
        name = func._schema.name.rpartition("::")[2]
        if name in _SYNCHRONIZING or _leaves_device(args, result):
            self._record_sync(name, on_cpu=all(each.device.type == "cpu" for each in tensors_in(args)))
        if not func.is_view and (phase := self._phase()):
            self._work.add(phase, self._module(phase), OperatorCall(func, args, kwargs, result))
        return result

    def _phase(self) -> Phase | None:
        if in_backward():
            return "backward"
        phase = place_of(sys._getframe(2)).phase
        if phase == "loop":  # the code of a custom loop calls the operator itself
            return "forward" if torch.is_grad_enabled() else "update"
        return {"forward": "forward", "backward": "backward", "update": "update"}.get(phase)  # type: ignore[return-value]

    def _module(self, phase: Phase) -> str:
        found = (paths.backward() if phase == "backward" else paths.stack[-1] for paths in self._paths)
        return next(filter(None, found), "")

    def _record_sync(self, name: str, *, on_cpu: bool) -> None:
        place = place_of(sys._getframe(2))
        counts_steps = on_cpu and place.phase == "update"  # torch's optimizers count steps on the host for every device
        if place.site and not counts_steps and place.phase not in ("data", "evaluation", "saving", "replaying"):
            self._syncs[name, place.site, place.phase] += 1

    def work(self) -> tuple[Work, ...]:
        """Return the sums of calls, FLOPs and bytes."""
        return self._work.rows()

    def syncs(self) -> tuple[HostSync, ...]:
        """Return the places where the host waited for a device, or would on a GPU."""
        return tuple(HostSync(op, site, phase, calls) for (op, site, phase), calls in self._syncs.most_common())

    def close(self) -> None:
        """Remove the hooks."""
        for paths in self._paths:
            paths.close()


def _leaves_device(args: OpArgs, result: OpResult) -> bool:
    """Return True if a tensor of a GPU was copied to the host, which waits for it."""
    taken, made = next(tensors_in(args), None), next(tensors_in((result,)), None)
    return taken is not None and made is not None and taken.device.type == "cuda" and made.device.type == "cpu"


SAMPLE_INTERVAL_S = 0.005
"""Mean seconds between samples. The intervals vary, because a loop may have the same period."""


class HostSampler:
    """Samples the position of a thread in the source, and returns the seconds at each place since the last ``take``.

    A sample counts for the time since the previous one, because samples are late while code holds the GIL.
    """

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._seconds = Counter[HostPlace]()
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="trainwright profile", daemon=True)

    def start(self) -> None:
        self._sampler.start()

    def take(self) -> Counter[HostPlace]:
        """Return the seconds by place since the last call."""
        with self._lock:
            seconds, self._seconds = self._seconds, Counter[HostPlace]()
        return seconds

    def close(self) -> None:
        """End the thread."""
        self._ends.set()
        self._sampler.join()

    def _sample(self) -> None:
        before_s = time.perf_counter()
        draws = random.Random(0)
        while not self._ends.wait(SAMPLE_INTERVAL_S * draws.uniform(0.5, 1.5)):
            place = place_of(sys._current_frames().get(self._thread))
            now_s = time.perf_counter()
            with self._lock:
                self._seconds[place] += now_s - before_s  # type: ignore[assignment]
            before_s = now_s
