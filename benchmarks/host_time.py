"""Processor time of a step that computes almost nothing: what ``tw.fit`` and ``tw.watch`` add to a plain loop.

    python -m benchmarks.host_time [--rounds 3] [--steps 600] [--quick]

On a GPU the time of the host is often the time of the step, and it can be measured on a CPU: the models here are chains
of linear layers of 4 x 4, with 8 to 600 tensors. The plain loop has the optimizer, the batches and the clipping that
``tw.fit`` uses. A figure is the processor time of the training thread in the median step after the first 128, less that
of the plain loop of the same round.

``NAME_fixed``       microseconds a step that do not depend on the number of tensors
``NAME_per_tensor``  microseconds a step for each tensor (least squares over the sizes)
``NAME_ops``         calls of ATen operators a step, beyond those of the plain loop, for each tensor

``fit`` is ``tw.fit`` at its defaults, ``fit_without_doctor`` has ``log.doctor: false``, ``watch`` is the plain loop in
``tw.watch``.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.profiler import profile

import trainwright as tw
from benchmarks.figures import about, arguments, figure

SIZES = (8, 64, 200, 600)
"""Tensors of the models."""
QUICK_SIZES = (8, 16)
WIDTH, ROWS, LR = 4, 8, 1e-3
FIRST, PROFILED = 128, 16
"""Steps that are not counted, and steps at the end whose operators are counted."""


def make_model(tensors: int) -> nn.Sequential:
    """Returns a chain of linear layers, of two tensors each."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(tensors // 2)))


def make_data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(64 * ROWS, WIDTH, generator=draw)
    return x, torch.randint(WIDTH, (64 * ROWS,), generator=draw)


@dataclass
class Clock:
    """Notes the processor time after each step, and counts the operators of the last PROFILED ones."""

    steps: int
    times_s: list[float] = field(default_factory=list)
    operators: float = 0.0
    _profile: profile | None = None

    def __call__(self) -> None:
        self.times_s.append(time.thread_time())
        taken = len(self.times_s)
        if taken == self.steps - PROFILED:
            self._profile = profile(use_cpu=True).__enter__()
        elif taken == self.steps and self._profile is not None:
            self._profile.__exit__(None, None, None)
            names = [event.name for event in self._profile.function_events or ()]
            self.operators = sum(name.startswith("aten::") for name in names) / PROFILED

    def observe(self, result: object, state: object) -> None:
        self()

    def close(self) -> None: ...

    @property
    def step_us(self) -> float:
        counted = self.times_s[FIRST : self.steps - PROFILED]
        return 1e6 * statistics.median(b - a for a, b in pairwise(counted))


def by_hand(tensors: int, clock: Clock, *, watched: bool = False) -> None:
    """Trains in a loop written by hand."""
    model, (x, y) = make_model(tensors), make_data()
    optimizer = torch.optim.AdamW(model.parameters(), LR, fused=True)
    watch = tw.watch(model, optimizer, out=None, quiet=True) if watched else nullcontext()
    with watch:
        while len(clock.times_s) < clock.steps:
            for ids in torch.randperm(len(x)).split(ROWS):
                optimizer.zero_grad()
                F.cross_entropy(model(x[ids]), y[ids]).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                clock()
                if len(clock.times_s) == clock.steps:
                    break


def by_fit(tensors: int, clock: Clock, **settings: object) -> None:
    """Trains with ``tw.fit``."""
    tw.fit(
        make_model(tensors),
        make_data(),
        F.cross_entropy,
        until=f"{clock.steps}steps",
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


def measured(variant: str, tensors: int, steps: int) -> Clock:
    """Trains in a folder of its own."""
    clock = Clock(steps)
    with tempfile.TemporaryDirectory(prefix="host-time-") as folder:
        before = Path.cwd()
        os.chdir(folder)
        try:
            VARIANTS[variant](tensors, clock)
        finally:
            os.chdir(before)
    return clock


def line_through(sizes: tuple[int, ...], values: list[float]) -> tuple[float, float]:
    """Returns value at 0 and slope of the least-squares line."""
    slope, fixed = np.polyfit(sizes, values, 1)
    return float(fixed), float(slope)


def main() -> None:
    options: Any = arguments(__doc__, rounds=(3, 1), steps=(600, FIRST + PROFILED + 8))
    torch.set_num_threads(1)
    sizes = QUICK_SIZES if options.quick else SIZES
    about("host_time")
    found: dict[str, list[tuple[float, float, float]]] = {}
    plain_us: list[float] = []
    for _ in range(options.rounds):
        rows = {size: {variant: measured(variant, size, options.steps) for variant in VARIANTS} for size in sizes}
        plain_us.append(rows[sizes[0]]["plain"].step_us)
        for variant in VARIANTS:
            if variant == "plain":
                continue
            more = [rows[size][variant].step_us - rows[size]["plain"].step_us for size in sizes]
            operators = [rows[size][variant].operators - rows[size]["plain"].operators for size in sizes]
            found.setdefault(variant, []).append((*line_through(sizes, more), line_through(sizes, operators)[1]))
    figure("host_time", f"plain_{sizes[0]}_tensors", plain_us, unit="us", against="absolute")
    for variant, values in found.items():
        for place, (name, unit) in enumerate((("fixed", "us"), ("per_tensor", "us"), ("ops", "operators per tensor"))):
            figure("host_time", f"{variant}_{name}", [each[place] for each in values], unit=unit, against="plain loop")


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
