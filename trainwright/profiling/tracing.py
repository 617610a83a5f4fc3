"""Runs torch's profiler for a few steps: time by operator and module, memory over time, and a trace for Perfetto."""

from __future__ import annotations

import os
import site
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import trainwright
from trainwright.profiling.audit import COMPILED_PREFIXES
from trainwright.profiling.verdict import ModuleTime, OperatorTime
from trainwright.runs.storage import make_subfolder

_PACKAGE = str(Path(trainwright.__file__).parent) + "/"
_TORCH = str(Path(torch.__file__).parent) + "/"
_LIBRARIES = tuple(
    {*site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))}
)

_LOOP = f"{_PACKAGE}engine/loop.py"
"""The file that calls ``observe`` of each observer."""
_FILES = {
    f"{_PACKAGE}engine/loop.py:_each_batch": "data",
    f"{_PACKAGE}optim/clip.py": "update",
    f"{_PACKAGE}engine/guard.py": "update",
    f"{_PACKAGE}engine/step.py:__call__": "update",
    f"{_PACKAGE}engine/rank_sums.py": "exchange",
    f"{_PACKAGE}engine/loss.py": "forward",
    f"{_PACKAGE}engine/step.py:_finish": "update",
    f"{_PACKAGE}engine/step.py:set_lr": "update",
    f"{_PACKAGE}engine/step.py:clear_grads": "update",
    f"{_PACKAGE}engine/evaluate.py": "evaluation",
    f"{_PACKAGE}monitoring/evaluation.py": "evaluation",
    f"{_PACKAGE}monitoring/saving.py": "saving",
    f"{_PACKAGE}recorder/": "looking",
    f"{_PACKAGE}watching/": "looking",
    f"{_PACKAGE}watching/experiments.py": "replaying",
    f"{_PACKAGE}watching/findings.py": "replaying",
    f"{_PACKAGE}replay/": "replaying",
    f"{_PACKAGE}doctor/": "replaying",
    f"{_PACKAGE}adapters/": "looking",
    f"{_TORCH}utils/data/dataloader.py:__next__": "data",
    f"{_TORCH}serialization.py:save": "saving",
    f"{_TORCH}distributed/": "exchange",
    f"{_TORCH}_tensor.py:backward": "backward",
    f"{_TORCH}autograd/": "backward",
    f"{_TORCH}optim/": "update",
    f"{_TORCH}amp/grad_scaler.py": "update",
    f"{_TORCH}nn/utils/clip_grad.py": "update",
    f"{_TORCH}nn/modules/module.py:_call_impl": "forward",
    f"{_TORCH}nn/functional.py": "forward",
}
"""The phase of code by its folder, file or function. ``replaying`` is left out of a profile: experiments on replays."""
_INNERMOST = ("replaying", "looking", "exchange")
"""Phases that apply even within another phase: hooks of the recorder run inside of the forward pass."""


class HostPlace(NamedTuple):
    """The position of a thread. ``label`` is the class of the running observer, or the function of user code.

    ``site`` is the innermost line of user code; "" if Trainwright code runs that the user code has called.
    """

    phase: str
    label: str
    site: str


def place_of(frame: FrameType | None) -> HostPlace:
    """Return the position of the thread whose innermost frame this is.

    The outermost phase applies: a dataset may use modules, and activation checkpointing runs them again in the backward
    pass. Exceptions are the forward pass, which may contain any other phase, and ``_INNERMOST``.

    The label and the site are of the user's innermost frame; empty if a frame of Trainwright is further in.
    Trainwright's ``__torch_function__`` is skipped, because the operators that it calls are the user's.
    """
    found = ""
    label = ""
    site = ""
    inner = ""
    in_package = False
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__torch_function__" and code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back
            continue
        phase = _phase_of_code(code)
        in_package = in_package or code.co_filename.startswith(_PACKAGE)
        if not site and not in_package and _is_user_code(code):
            site, label = f"{Path(code.co_filename).name}:{frame.f_lineno}", code.co_qualname
        if code.co_name == "observe" and frame.f_back is not None and frame.f_back.f_code.co_filename == _LOOP:
            owner = frame.f_locals.get(code.co_varnames[0])
            owner = getattr(owner, "function", owner)
            return HostPlace(inner or "looking", getattr(owner, "__name__", type(owner).__name__), site)
        if phase in _INNERMOST:
            inner = inner or phase
        if phase and (phase != "forward" or not found):
            found = phase
        frame = frame.f_back
    return HostPlace(found if found in ("data", "saving", "evaluation") else inner or found or "loop", label, site)


@cache
def _phase_of_code(code: CodeType) -> str | None:
    path = code.co_filename
    folders = (path[: index + 1] for index, letter in enumerate(path) if letter == "/")
    keys = (f"{path}:{code.co_name}", path, *folders)
    return next((_FILES[key] for key in keys if key in _FILES), None)


@cache
def _is_user_code(code: CodeType) -> bool:
    return not code.co_filename.startswith(("<frozen", _PACKAGE, _TORCH, *_LIBRARIES))


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
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise Kineto writes to stderr when it starts and stops
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
        lowest = min([0, *curve])  # the trace may free memory that was allocated before it
        return _peaks([each - lowest for each in curve])

    def kernels(self) -> dict[str, float]:
        """Return the number of calls per step of GPU kernels and compiled regions, by name."""
        calls = Counter(event.name for event in self._on_device)
        calls.update(event.name for event in self._events if event.name.startswith(COMPILED_PREFIXES))
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


def _with_callers(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


def _phase_of(event: Any) -> str:
    prefixes = {_BACKWARD: "backward", _UPDATE: "update", _DATA: "data", MODULE_PREFIX: "forward"}
    for each in _with_callers(event):
        for prefix, phase in prefixes.items():
            if each.name.startswith(prefix):
                return phase
    return "loop"


def _module_of(event: Any) -> str | None:
    names = (each.name for each in _with_callers(event) if each.name.startswith(MODULE_PREFIX))
    path: str | None = next((name.removeprefix(MODULE_PREFIX) for name in names), None)
    return path


def _number_in_backward(event: Any) -> int:
    numbers = (int(each.sequence_nr) for each in _with_callers(event) if each.name.startswith(_BACKWARD))
    return next(numbers, -1)


def _peaks(curve: list[int]) -> tuple[int, ...]:
    if len(curve) <= MEMORY_POINTS:
        return tuple(curve)
    edges = [round(index * len(curve) / MEMORY_POINTS) for index in range(MEMORY_POINTS + 1)]
    return tuple(max(curve[begin:end]) for begin, end in pairwise(edges) if begin < end)
