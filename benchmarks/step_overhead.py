"""``tw.fit`` and ``trainwright train`` with all defaults, compared with a plain loop.

    python -m benchmarks.step_overhead [--rounds 3] [--tasks mlp,gpt] [--only plain,fit] [--seconds 80] [--quick]

The defaults include doctor, checkpoints and log. Output is not printed to a terminal. The plain loop has AdamW,
``clip_grad_norm_`` at 1.0 and a ``LambdaLR``, the same batches in memory and the same number of threads, but no log, no
checkpoint and no guard.

Each run is a process, because a thread that is left by a run would slow the next one down. A round runs every variant
once; each round begins with another variant. The figures of a task:

``TASK_plain_step``      microseconds of a step of the plain loop
``TASK_VARIANT``         mean time of a step after the first 64, as a ratio to the plain loop of the same round
``TASK_VARIANT_median``  the same for the median step, which leaves out saves and examinations
``TASK_VARIANT_run``     the full run, from its first line of code to its last, as a ratio to the plain loop
``TASK_VARIANT_first_64``  extra time of the first 64 steps, compared with later steps, as a fraction of the full run
``TASK_VARIANT_same_optimizer``  like ``TASK_VARIANT``, relative to a plain loop with Trainwright's AdamW implementation

``--steps`` is the length of the MLP's run; the GPT's is a twelfth of it. A task begins no round after ``--seconds``.
``--only all`` also runs ``trainwright train`` and, if installed, Fabric, Accelerate, the HF Trainer and Lightning, with
their defaults, the same clipping and no progress bar. ``python -m benchmarks.host_time`` measures the CPU time of a
step by the number of tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from benchmarks.figures import about, figure, ratios
from benchmarks.processes import python
from benchmarks.step_overhead_variants import FIRST, OURS, VARIANTS

PEERS = {"fabric": "lightning", "accelerate": "accelerate", "transformers": "transformers", "lightning": "lightning"}
"""Required package by variant."""
TASKS = ("mlp", "gpt")
BY_DEFAULT = "plain_same_optimizer,fit,fit_no_doctor"
ROUNDS = 3
STEPS = 1000
GPT_SHARE = 12  # a step of the GPT takes about a hundred times as long as one of the MLP


def available() -> list[str]:
    """Returns the variants that can run here."""
    return [name for name in VARIANTS if name not in PEERS or find_spec(PEERS[name])]


def measured(
    task: str, variant: str, *, steps: int, options: argparse.Namespace, optimizer: dict[str, bool]
) -> dict[str, object]:
    """Runs one variant in a new process. Returns its output, and the seconds of the full process as ``process_s``."""
    path = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": path}
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        request = json.dumps(
            {"task": task, "variant": variant, "steps": steps, "optimizer": optimizer, "device": options.device}
        )
        begin_s = time.perf_counter()
        words = ["-W", "ignore", "-m", "benchmarks.step_overhead_variants", request]
        printed = python(words, cwd=Path(folder), env=environ, forks=options.quick)
        process_s = time.perf_counter() - begin_s
    return {**json.loads(printed.splitlines()[-1]), "process_s": process_s}


class Rounds:
    """The measurements of all rounds: ``values[variant][quantity]``, one number per round."""

    def __init__(self, task: str) -> None:
        self.task = task
        self.values: dict[str, dict[str, list[float]]] = {}
        self.optimizer: dict[str, bool] = {}

    def run(self, variants: list[str], steps: int, options: argparse.Namespace) -> None:
        """Runs all variants in each round."""
        begin_s = time.perf_counter()
        for number in range(options.rounds):
            if number and time.perf_counter() - begin_s > options.seconds:
                return
            first = number % len(variants)
            for variant in variants[first:] + variants[:first]:
                seen = measured(self.task, variant, steps=steps, options=options, optimizer=self.optimizer)
                if variant in OURS and seen.get("optimizer"):
                    self.optimizer = seen["optimizer"]  # type: ignore[assignment]
                self._note(variant, seen, steps)

    def _note(self, variant: str, seen: dict[str, object], steps: int) -> None:
        times_s: list[float] = seen["times_s"]  # type: ignore[assignment]
        numbers: list[int] = seen["steps"]  # type: ignore[assignment]
        after = next(place for place, number in enumerate(numbers) if number >= min(FIRST, steps // 2))
        step_s = (times_s[-1] - times_s[after]) / (numbers[-1] - numbers[after])
        quantities = {"step_s": step_s, "process_s": float(str(seen["process_s"]))}
        if "run_s" in seen:
            run_s = float(str(seen["run_s"]))
            each_s = [later - earlier for earlier, later in zip(times_s[after:], times_s[after + 1 :])]
            extra_s = times_s[after] - times_s[0] - (numbers[after] - numbers[0]) * step_s
            quantities |= {"median_s": statistics.median(each_s), "run_s": run_s, "first_share": extra_s / run_s}
        for name, value in quantities.items():
            self.values.setdefault(variant, {}).setdefault(name, []).append(value)

    def show(self) -> None:
        plain = self.values["plain"]
        self._figure("plain_step", [1e6 * s for s in plain["step_s"]], "us", "absolute")
        self._figure("plain_first_64", plain["first_share"], "share", "the whole run")
        for variant, seen in self.values.items():
            if variant == "plain":
                continue
            self._figure(variant, ratios(seen["step_s"], plain["step_s"]))
            if "run_s" in seen:
                self._figure(f"{variant}_median", ratios(seen["median_s"], plain["median_s"]))
                self._figure(f"{variant}_run", ratios(seen["run_s"], plain["run_s"]))
                self._figure(f"{variant}_first_64", seen["first_share"], "share", "the whole run")
            else:
                self._figure(f"{variant}_process", ratios(seen["process_s"], plain["process_s"]))
            if variant in OURS and (same := self.values.get("plain_same_optimizer")):
                against = f"plain loop, AdamW({', '.join(f'{k}={v}' for k, v in self.optimizer.items())})"
                self._figure(f"{variant}_same_optimizer", ratios(seen["step_s"], same["step_s"]), "ratio", against)

    def _figure(self, case: str, values: list[float], unit: str = "ratio", against: str = "plain loop") -> None:
        figure("step_overhead", f"{self.task}_{case}", values, unit=unit, against=against)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=0, help=f"default {ROUNDS}, with --quick 1")
    parser.add_argument("--steps", type=int, default=0, help=f"default {STEPS}, with --quick 40")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--only", default=BY_DEFAULT, help=f"all, or of {', '.join(VARIANTS)}; plain always runs")
    parser.add_argument("--seconds", type=float, default=80.0, help="no round of a task begins after them")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch, in every variant")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="a functional test: its figures mean little")
    parsed = parser.parse_args()
    parsed.rounds = parsed.rounds or (1 if parsed.quick else ROUNDS)
    parsed.steps = parsed.steps or (40 if parsed.quick else STEPS)
    return parsed


def main() -> None:
    options = parse_options()
    about("step_overhead")
    wanted = available() if options.only == "all" else options.only.split(",")
    variants = ["plain", *(name for name in available() if name in wanted and name != "plain")]
    for task in options.tasks.split(","):
        rounds = Rounds(task)
        steps = options.steps if task == "mlp" or options.quick else options.steps // GPT_SHARE
        if "plain_same_optimizer" in variants:  # a run of ``tw.fit`` reports which optimizer this is
            first = measured(task, "fit", steps=8, options=options, optimizer={})
            rounds.optimizer = first["optimizer"]  # type: ignore[assignment]
        rounds.run(variants, steps, options)
        rounds.show()


if __name__ == "__main__":
    main()
