"""Runs torch's profiler for a few steps: time by operator and module, memory over time, and a trace for Perfetto."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from trainwright.profiling.audit import COMPILED_MARKS
from trainwright.profiling.facts import ModuleTime, OperatorTime
from trainwright.runs.storage import make_subfolder

MODULE_PREFIX = "module: "
MEMORY_POINTS = 300
"""Points of the memory curve; each is the maximum of its span."""
MAX_ROWS = 40
"""The number of slowest operators and modules that are kept."""
MAX_KERNELS = 200
_BACKWARD = "autograd::engine::evaluate_function"
_UPDATE = "Optimizer.step"
_DATA = "enumerate(DataLoader)"


class StepTracer:
    """The profiler, active until ``close``, and a range around each module's forward pass."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._open, self._ranges = ExitStack(), list[record_function]()
        self._kinds = {name: type(module).__name__ for root in roots for name, module in root.named_modules()}
        for root in roots:
            for path, module in root.named_modules():
                self._add_hooks(path, module)
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise it writes to stderr when it starts and stops
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = profile(activities=activities, profile_memory=True)
        self._profile.start()

    def _add_hooks(self, path: str, module: nn.Module) -> None:
        def enter(*_: object) -> None:
            self._ranges.append(record_function(f"{MODULE_PREFIX}{path}"))
            self._ranges[-1].__enter__()  # type: ignore[no-untyped-call]

        def leave(*_: object) -> None:
            if self._ranges:
                self._ranges.pop().__exit__(None, None, None)

        for handle in (
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave, always_call=True),
        ):
            self._open.callback(handle.remove)

    def close(self, steps: int, trace: Path | None) -> TracedSteps:
        """End the profiler after ``steps`` steps and write the ``trace``, compressed if its name ends in .gz."""
        self._open.close()
        self._profile.stop()
        if trace is not None:
            make_subfolder(trace.parent)
            self._profile.export_chrome_trace(str(trace))
        return TracedSteps(self._profile, steps, self._kinds)


class TracedSteps:
    """The results of the profiler over ``steps`` steps."""

    def __init__(self, seen: profile, steps: int, kinds: dict[str, str]) -> None:
        self._steps, self._kinds = steps, kinds
        assert seen.profiler is not None and seen.profiler.kineto_results is not None
        events: Iterable[Any] = seen.events() or ()  # type: ignore[no-untyped-call]
        self._raw: list[Any] = seen.profiler.kineto_results.events()
        self._events = [event for event in events if event.device_type.name == "CPU"]
        self._on_device = [event for event in events if event.device_type.name != "CPU"]

    def operators(self) -> tuple[OperatorTime, ...]:
        """Return the slowest operators, by phase."""
        sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for event in self._events:
            if event.name.startswith((MODULE_PREFIX, "Profiler", "[")):
                continue
            one = sums[_phase_of(event), event.name.removeprefix(f"{_BACKWARD}: ")]
            one[0] += 1
            one[1] += event.self_cpu_time_total
            one[2] += event.self_device_time_total
        rows = [
            OperatorTime(*key, one[0] / self._steps, one[1] / 1e6 / self._steps, one[2] / 1e6 / self._steps)
            for key, one in sums.items()
        ]
        return tuple(sorted(rows, key=lambda row: -(row.device_s or row.host_s))[:MAX_ROWS])

    def modules(self) -> tuple[ModuleTime, ...]:
        """Return the slowest modules.

        The backward pass of an operator counts for the module that called its forward pass.
        """
        made_in: dict[int, str] = {}
        forward: dict[str, float] = defaultdict(float)
        backward: dict[str, float] = defaultdict(float)
        ordered = sorted(self._events, key=lambda event: bool(_phase_of(event) == "backward"))
        for event in ordered:
            seconds = (event.self_device_time_total or event.self_cpu_time_total) / 1e6 / self._steps
            if _phase_of(event) == "backward":
                backward[made_in.get(_number_in_backward(event), "")] += seconds
            elif (path := _module_of(event)) is not None:
                forward[path] += seconds
                if event.sequence_nr >= 0:
                    made_in.setdefault(event.sequence_nr, path)
        rows = [
            ModuleTime(path, self._kinds.get(path, ""), forward[path], backward[path])
            for path in {**forward, **backward}
        ]
        return tuple(sorted(rows, key=lambda row: -(row.forward_s + row.backward_s))[:MAX_ROWS])

    def memory(self) -> tuple[int, ...]:
        """Return the bytes that were allocated and not freed, over time, from the start of the trace; at least 0."""
        held, curve = 0, list[int]()
        for event in sorted((e for e in self._raw if e.name() == "[memory]"), key=lambda e: e.start_ns()):
            held += event.nbytes()
            curve.append(held)
        lowest = min([0, *curve])  # memory from before the trace is freed in it
        return _peaks([each - lowest for each in curve])

    def kernels(self) -> dict[str, float]:
        """Return the calls in a step of the kernels of a GPU and of compiled regions, by name."""
        calls = Counter(event.name for event in self._on_device)
        calls.update(event.name for event in self._events if event.name.startswith(COMPILED_MARKS))
        return {name: count / self._steps for name, count in calls.most_common(MAX_KERNELS)}

    def busy(self) -> float | None:
        """Return the fraction of the time in which a GPU computed; None without one."""
        if not self._on_device:
            return None
        spans = sorted((event.time_range.start, event.time_range.end) for event in self._on_device)
        busy, until = 0.0, spans[0][0]
        for begin, end in spans:
            busy += max(0.0, end - max(begin, until))
            until = max(until, end)
        every = [event.time_range for event in self._events]
        whole = max(each.end for each in every) - min(each.start for each in every)
        return float(busy / whole)


def _phase_of(event: Any) -> str:
    while event is not None:
        for beginning, phase in (
            (_BACKWARD, "backward"),
            (_UPDATE, "update"),
            (_DATA, "data"),
            (MODULE_PREFIX, "forward"),
        ):
            if event.name.startswith(beginning):
                return phase
        event = event.cpu_parent
    return "loop"


def _module_of(event: Any) -> str | None:
    while event is not None:
        if event.name.startswith(MODULE_PREFIX):
            return str(event.name.removeprefix(MODULE_PREFIX))
        event = event.cpu_parent
    return None


def _number_in_backward(event: Any) -> int:
    while event is not None:
        if event.name.startswith(_BACKWARD):
            return int(event.sequence_nr)
        event = event.cpu_parent
    return -1


def _peaks(curve: list[int]) -> tuple[int, ...]:
    if len(curve) <= MEMORY_POINTS:
        return tuple(curve)
    edges = [round(index * len(curve) / MEMORY_POINTS) for index in range(MEMORY_POINTS + 1)]
    return tuple(max(curve[begin:end]) for begin, end in pairwise(edges) if begin < end)
