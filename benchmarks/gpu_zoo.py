"""The zoo on a GPU: the named faults and healthy runs, with their models and batches moved there.

    python -m benchmarks.gpu_zoo [--device cuda] [--jobs 12] [--seconds 300]

When a program starts its watch, its modules are moved to the device, which becomes the default device. Batches of its
DataLoaders are moved, too. Programs that use other CPU tensors raise an error of torch about devices; these runs are
counted as "cpu only" and not evaluated. Programs that were not started within ``--seconds`` are counted as well. A line
is printed for each alarm of a healthy program, each missed fault, and each failure of the watch.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from queue import Empty
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.figures import about
from zoo import judge

ABOUT_DEVICES = (
    "same device",
    "device type",
    "expected device",
    "Expected a '",
    "can't convert cuda",
    "weight type",
    "is on cpu",
    "is on cuda",
    "different device",
    "on CPU",
)
"""Parts of torch's error messages about tensors on different devices."""


def moved(value: Any, device: str) -> Any:
    """Returns a value with the tensors in its tuples, lists and dicts moved to the device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(each, device) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(moved(each, device) for each in value)
    return value


@contextmanager
def on(device: str) -> Iterator[Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Context in which DataLoaders yield batches on the device.

    Yields a function that returns a version of ``tw.watch`` that first moves the models to the device.
    """
    iterate = DataLoader.__iter__

    def batches(loader: DataLoader[Any]) -> Iterator[Any]:
        with torch.device("cpu"):  # samplers draw the order on the CPU
            source = iterate(loader)
        while True:
            with torch.device("cpu"):
                try:
                    batch = next(source)
                except StopIteration:
                    return
            yield moved(batch, device)

    def moving(watch: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(watch)
        def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
            for root in model if isinstance(model, list | tuple) else [model]:
                if isinstance(root, nn.Module):
                    root.to(device)
            torch.set_default_device(device)
            return watch(model, *args, **kwargs)

        return watched

    DataLoader.__iter__ = batches  # type: ignore[method-assign, assignment]
    try:
        yield moving
    finally:
        DataLoader.__iter__ = iterate  # type: ignore[method-assign]
        torch.set_default_device(None)


def one(name: str, device: str) -> dict[str, Any]:
    """Runs one entry of the zoo on the device, and returns the results as a line. Called in a process of the pool."""
    torch.set_num_threads(1)
    trace = ""

    def traced(run: Callable[..., Any], *args: Any) -> Any:
        nonlocal trace
        try:
            return run(*args)
        except Exception:
            trace = traceback.format_exc()
            raise

    line: dict[str, Any] = {"name": name}
    with on(device) as moving:
        entry = judge.load()[name]
        score, _ = judge.run(replace(entry, run=lambda watch, seed: traced(entry.run, moving(watch), seed)), 0)
        line |= {"steps": score.steps, "seconds": score.seconds, "error": score.error, "said": score.said[:5]}
        line |= {"failures": [score.error] if score.failed else [], "rank": score.rank, "in_time": score.in_time}
        line |= {"detected": score.detected, "located": score.located, "early": score.early}
        line["alarms"], line["critical"] = score.critical + score.warned, len(score.critical)
    line["cpu_only"] = bool(line["error"] and any(words in line["error"] for words in ABOUT_DEVICES))
    if "trainwright/" in trace or (line["error"] and not line["cpu_only"]):
        line["trace"] = trace[-1800:]
    return line


def is_told(line: dict[str, Any]) -> bool:
    """Return True if a line is printed for the run."""
    if line["failures"] or ("trace" in line):
        return True
    if line["cpu_only"]:
        return False
    quiet = line["name"].startswith("H")
    return bool(line["alarms"]) if quiet else line["rank"] != 0 or not line["in_time"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=300.0, help="after so many nothing more is begun")
    options = parser.parse_args()
    about("gpu_zoo")
    end_s = time.monotonic() + options.seconds
    jobs = sorted(judge.load(), key=_place)
    counts: Counter[str] = Counter()
    for line in _lines(jobs, options.device, options.jobs, end_s):
        _count(line, counts)
    counts["not reached"] = len(jobs) - counts["fault runs"] - counts["healthy runs"]
    print(json.dumps({"bench": "gpu_zoo", "device": options.device, **counts}), flush=True)


def _work(jobs: Any, lines: Any, device: str) -> None:
    """Runs jobs until none is left, or until an error has made the CUDA context of this process unusable."""
    with suppress(Empty):
        while True:
            line = one(jobs.get(timeout=1.0), device)
            lines.put(line)
            if "CUDA error" in str(line["error"]):
                break
    lines.put(None)


def _lines(jobs: Sequence[str], device: str, processes: int, end_s: float) -> Iterator[dict[str, Any]]:
    """Yield results as they arrive until ``end_s``. A process that had to stop is replaced."""
    context = multiprocessing.get_context("spawn")
    todo, lines = context.Queue(), context.Queue()
    for job in jobs:
        todo.put(job)

    def start() -> Any:
        process = context.Process(target=_work, args=(todo, lines, device), daemon=True)
        process.start()
        return process

    started, missing = [start() for _ in range(processes)], len(jobs)
    with suppress(Empty):
        while missing and (left_s := end_s - time.monotonic()) > 0:
            if (line := lines.get(timeout=left_s)) is not None:
                missing -= 1
                yield line
            elif missing:
                started.append(start())
    for process in started:
        process.kill()
    todo.cancel_join_thread()


def _place(name: str) -> float:
    """Returns a fixed pseudo-random number in [0, 1) for a name, by which the jobs are sorted."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def _count(line: dict[str, Any], counts: Counter[str]) -> None:
    kind = "healthy" if line["name"].startswith("H") else "fault"
    counts[f"{kind} runs"] += 1
    counts["failed watches"] += bool(line["failures"])
    if is_told(line):
        print(json.dumps(line), flush=True)
    if line["cpu_only"]:
        counts[f"{kind} cpu only"] += 1
    elif kind == "healthy":
        counts["healthy raised"] += bool(line["error"])
        counts["healthy alarmed"] += bool(line["alarms"])
        counts["healthy criticals"] += line["critical"]
    else:
        counts["fault detected"] += bool(line["detected"])
        counts["fault named first"] += line["rank"] == 0
        counts["fault in time"] += bool(line["in_time"])


if __name__ == "__main__":
    main()
