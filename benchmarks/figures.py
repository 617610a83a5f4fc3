"""Helpers of the benchmarks: options, interleaved measurements, and one JSON line per figure on stdout."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from trainwright.plan.machine import read_machine

THREADS = 2
PACKAGES = ("trainwright", "torch", "lightning", "accelerate", "transformers", "numpy")


def arguments(description: str | None, **defaults: tuple[float | str, float | str]) -> argparse.Namespace:
    """Reads ``--quick``, ``--threads``, and ``--name`` for each ``name=(default, default with --quick)``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a functional test: its figures mean little")
    parser.add_argument("--threads", type=int, default=THREADS, help="threads of torch, in both sides")
    for name, (normal, quick) in defaults.items():
        parser.add_argument(f"--{name}", type=type(normal), help=f"default {normal}, with --quick {quick}")
    options = parser.parse_args()
    for name, (normal, quick) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else normal)
    return options


def about(bench: str) -> None:
    """Prints the first JSON line: date, command, versions and machine of the figures."""
    line = {
        "bench": bench,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "command": " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else read_machine().cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
    }
    print(json.dumps(line), flush=True)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def figure(bench: str, case: str, values: Sequence[float], *, unit: str, against: str) -> None:
    """Prints the median and the range of ``values`` as one JSON line, with null if there are no values.

    ``against`` names what the figure is compared with.
    """
    rounded = [float(f"{value:.4g}") for value in values]
    line = {
        "bench": bench,
        "case": case,
        "value": float(f"{statistics.median(values):.4g}") if values else None,
        "unit": unit,
        "against": against,
        "n": len(values),
        "spread": [min(rounded), max(rounded)] if values else None,
    }
    print(json.dumps(line), flush=True)


def interleaved(
    blocks: Mapping[str, Callable[[], float]], rounds: int, *, uncounted: int = 1
) -> dict[str, list[float]]:
    """Return the measurements of each block in each round, by name.

    A round runs every block once. Each round begins with another block, so that other load and the cost of being first
    affect all blocks alike. Garbage is collected before each block. The collector stays on within it, because its runs
    are part of the cost. ``uncounted`` rounds come before the first.
    """
    seen: dict[str, list[float]] = {name: [] for name in blocks}
    names = list(blocks)
    for number in range(-uncounted, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            gc.collect()
            value = blocks[name]()
            if number >= 0:
                seen[name].append(value)
    return seen


def seconds_of(act: Callable[[], object]) -> float:
    """Returns the wall time of one call."""
    begin_s = time.perf_counter()
    act()
    return time.perf_counter() - begin_s


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]
