"""CPU time that ``tw.fit`` and ``tw.watch`` add to the step of a plain loop. The step computes almost nothing.

    python -m benchmarks.host_time [--sizes 8,100] [--turns 10] [--seconds 20] [--quick]

On a GPU the time of the host is often the time of the step, and it can be measured on a CPU: the models here are chains
of linear layers of 4 x 4, with 8 tensors or more. The plain loop has the optimizer, the batches and the clipping that
``tw.fit`` uses. Each variant is a process. After 128 steps they take turns of 16 steps, so other load affects all
alike. A value is the processor time of the training thread in the median step of a turn, minus that of the adjacent
turn of the plain loop. A size starts no turn after ``--seconds``, except for its first three.

``NAME_fixed``       microseconds per step, independent of the number of tensors
``NAME_per_tensor``  microseconds per step and tensor (least squares over the sizes)
``NAME_calls``       calls of ATen operators in the median step, beyond those of the plain loop
``NAME_calls_per_tensor``  the same for each tensor
``NAME_python_calls``, ``NAME_python_calls_per_tensor``  the same for calls of Python functions

The numbers of calls are the same on a busy machine; the times are not.

``fit`` is ``tw.fit`` at its defaults, ``fit_without_doctor`` has ``log.doctor: false``, ``watch`` is the plain loop in
``tw.watch``. The benchmark takes a minute on two idle cores, and two more for 600 tensors.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import trainwright as tw
from benchmarks.figures import about, arguments, figure
from benchmarks.turns import Child, TurnsOver, wait_for_turn

WIDTH, ROWS, LR = 4, 8, 1e-3
FIRST, TURN, SETTLING, PROFILED = 128, 16, 3, 9
"""Steps before the first turn, steps of a turn, uncounted steps at the start of a turn, and profiled steps."""


def make_model(tensors: int) -> nn.Sequential:
    """Returns a chain of linear layers with two tensors each."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(tensors // 2)))


def make_data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(64 * ROWS, WIDTH, generator=draw)
    return x, torch.randint(WIDTH, (64 * ROWS,), generator=draw)


@dataclass
class Clock:
    """Called after each step. Counts calls in the first steps. Then waits for the next turn after each TURN steps."""

    times_s: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    python_calls: list[int] = field(default_factory=list)
    step: int = 0
    _profile: profile | None = None

    def __call__(self) -> None:
        sys.setprofile(None)
        self.times_s.append(time.thread_time())
        self.step += 1
        if self._profile is not None:
            self._profile.stop()
            self.calls.append(calls_of(self._profile))
            self._profile = None
        if FIRST - 2 * PROFILED <= self.step < FIRST - PROFILED:
            self._profile = profile(activities=[ProfilerActivity.CPU])
            self._profile.start()
        elif FIRST - PROFILED <= self.step < FIRST:
            self.python_calls.append(0)
            sys.setprofile(self._count)
        elif self.step >= FIRST and (self.step - FIRST) % TURN == 0:
            self._wait_for_turn()

    def _count(self, _frame: FrameType, event: str, _argument: object) -> None:
        self.python_calls[-1] += event == "call"

    def _wait_for_turn(self) -> None:
        if self.step == FIRST:
            counted = {"calls": self.calls, "python_calls": self.python_calls}
            answer: dict[str, float] = {name: statistics.median(each) for name, each in counted.items()}
        else:
            answer = {"us": 1e6 * statistics.median(b - a for a, b in pairwise(self.times_s[SETTLING:]))}
        wait_for_turn(answer)
        self.times_s = []

    def observe(self, result: object, state: object) -> None:
        self()

    def close(self) -> None: ...


def calls_of(done: profile) -> int:
    """Returns the number of ATen operators. Building torch's own list of events takes seconds for a large model."""
    assert done.profiler is not None
    results: Any = done.profiler.kineto_results
    return sum(event.name().startswith("aten::") for event in results.events())


def by_hand(tensors: int, clock: Clock, *, watched: bool = False) -> None:
    model, (x, y) = make_model(tensors), make_data()
    optimizer = torch.optim.AdamW(model.parameters(), LR, fused=True)
    watch = tw.watch(model, optimizer, out=None, quiet=True) if watched else nullcontext()
    with watch:
        while True:
            for ids in torch.randperm(len(x)).split(ROWS):
                optimizer.zero_grad()
                F.cross_entropy(model(x[ids]), y[ids]).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                clock()


def by_fit(tensors: int, clock: Clock, **settings: object) -> None:
    tw.fit(
        make_model(tensors),
        make_data(),
        F.cross_entropy,
        until="1000000steps",
        lr=LR,
        batch=ROWS,
        schedule="constant",
        clip=1.0,
        settings=settings,
        observers=[clock],
        quiet=True,
    )


VARIANTS: dict[str, Callable[[int, Clock], None]] = {
    "plain": by_hand,
    "fit": by_fit,
    "fit_without_doctor": lambda tensors, clock: by_fit(tensors, clock, **{"log.doctor": False}),
    "watch": lambda tensors, clock: by_hand(tensors, clock, watched=True),
}


def child(variant: str, tensors: int) -> None:
    """Trains in its own folder until the parent process ends the turns."""
    torch.set_num_threads(1)
    clock = Clock()
    with tempfile.TemporaryDirectory(prefix="host-time-", ignore_cleanup_errors=True) as folder, suppress(TurnsOver):
        os.chdir(folder)
        VARIANTS[variant](tensors, clock)


class Size(NamedTuple):
    """Results of models of one size, by variant: the numbers of calls by kind, and the microseconds of each turn."""

    counted: dict[str, dict[str, float]]
    turns_us: dict[str, list[float]]


def measured(tensors: int, turns: int, limit_s: float) -> Size:
    """Runs all variants, which take turns."""
    children = {variant: Child("benchmarks.host_time", variant, str(tensors)) for variant in VARIANTS}
    try:
        counted = {variant: each.answer() for variant, each in children.items()}
        begin_s = time.perf_counter()
        turns_us: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for number in range(turns):
            if number > 2 and time.perf_counter() - begin_s > limit_s:
                break
            for variant, each in children.items():
                turns_us[variant].append(each.turn()["us"])
    finally:
        for each in children.values():
            each.close()
    return Size(counted, turns_us)


def line_through(sizes: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """Returns value at 0 and slope of the least-squares line."""
    slope, fixed = np.polyfit(sizes, values, 1)
    return float(fixed), float(slope)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]))
        return
    options: Any = arguments(__doc__, sizes=("8,100", "8,16"), turns=(10, 2), seconds=(20.0, 20.0))
    sizes = [int(size) for size in options.sizes.split(",")]
    about("host_time")
    found = {size: measured(size, options.turns, options.seconds) for size in sizes}
    num_turns = min(len(each.turns_us["plain"]) for each in found.values())
    for size, each in found.items():
        figure("host_time", f"plain_{size}_tensors", each.turns_us["plain"], unit="us", against="absolute")
    for variant in VARIANTS:
        if variant == "plain":
            continue
        more_us = [
            [each.turns_us[variant][turn] - each.turns_us["plain"][turn] for each in found.values()]
            for turn in range(num_turns)
        ]
        for place, (name, unit) in enumerate((("fixed", "us"), ("per_tensor", "us"))):
            values = [line_through(sizes, row)[place] for row in more_us]
            figure("host_time", f"{variant}_{name}", values, unit=unit, against="plain loop")
        for kind in ("calls", "python_calls"):
            more = [each.counted[variant][kind] - each.counted["plain"][kind] for each in found.values()]
            fixed, slope = line_through(sizes, more)
            figure("host_time", f"{variant}_{kind}", [round(fixed, 3)], unit="calls", against="plain loop")
            figure("host_time", f"{variant}_{kind}_per_tensor", [round(slope, 6)], unit="calls", against="plain loop")


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
