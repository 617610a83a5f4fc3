"""Compares the times that a run predicts, before the first step and after 50 steps, with the measured ones.

    python -m benchmarks.time_foretold [--quick] [--only gpt-tiny,demo]

Each built-in recipe trains in a new process, unchanged except for its length. The figures are measured time / predicted
time: ``step`` for a step, ``run`` from the first step to the end, and ``left`` from step 50 to the end.
``demo_budget`` is the time of ``demo --budget 20s`` from its first step to its end, divided by 20 s, and
``demo_training`` the fraction of that time in which it trained.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.figures import about, arguments, figure
from benchmarks.startup import OUR_COMMAND, in_a_process
from trainwright.monitoring.progress import STEPS_BEFORE_PREDICTION

LENGTHS = {
    "demo": ("until=300steps", "until=12s"),
    "demo-digits": ("until=300steps", "until=12s"),
    "gpt-lora": ("until=300steps",),
    "gpt-tiny": ("until=300steps",),
    "hf-lora": ("until=300steps",),
    "lstm-text": ("until=150steps",),
    "resnet-digits": ("until=4ep",),
}
"""Lengths by recipe, for the recipes that train on two cores."""
SMALL = ("model.args.width=4", "log.doctor=false")
"""Settings for ``--quick``."""
CORRECTED = re.compile(r"a step takes .* ends about [^,]+, in (?:(\d+) min )?([0-9.e+]+) (ms|s)$")


@dataclass
class Run:
    """The predicted and the measured times of a run.

    ``left_s`` is the remaining time that the run predicts at step ``STEPS_BEFORE_PREDICTION``.
    """

    plan: dict[str, Any]
    records: list[dict[str, Any]]
    left_s: float | None

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == "step"]

    @property
    def step_s(self) -> float:
        """Mean time of a step over all steps. A record has the mean of the steps since the previous record."""
        numbers = [0, *(record["step"] for record in self.steps)]
        return sum(r["step_s"] * (b - a) for r, (a, b) in zip(self.steps, pairwise(numbers))) / numbers[-1]

    @property
    def after_that_s(self) -> float:
        """Time from step ``STEPS_BEFORE_PREDICTION`` to the end."""
        said_s = next(record["time_s"] for record in self.steps if record["step"] >= STEPS_BEFORE_PREDICTION)
        return float(self.records[-1]["time_s"] - said_s)


def trained(recipe: str, until: str, threads: int, more: Sequence[str], *, forks: bool) -> Run:
    """Runs a recipe to its end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = [option for each in (until, "log.every=10steps", *more) for option in ("--set", each)]
        said = in_a_process(OUR_COMMAND, "train", recipe, *settings, threads=threads, folder=folder, forks=forks)
        (run,) = (folder / "runs").iterdir()
        records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        found = next(filter(None, map(CORRECTED.search, said.splitlines())), None)
        left_s = found and 60 * int(found[1] or 0) + float(found[2]) * (1e-3 if found[3] == "ms" else 1)
        return Run(json.loads((run / "plan.json").read_text()), records, left_s)


def measured(recipe: str, until: str, threads: int, rounds: int, more: Sequence[str], *, forks: bool) -> None:
    """Prints the figures of a recipe."""
    runs = [trained(recipe, until, threads, more, forks=forks) for _ in range(rounds)]
    came = {
        "step": [run.step_s / run.plan["step_s"] for run in runs],
        "run": [run.records[-1]["seconds"] / sum(run.plan["seconds"].values()) for run in runs],
        "left": [run.after_that_s / run.left_s for run in runs if run.left_s],
    }
    for what, values in came.items():
        case = f"{recipe}_{until.partition('=')[2]}_{what}"
        figure("time_foretold", case, values, unit="ratio", against="predicted")


def demo_budget(threads: int, budget_s: float) -> tuple[float, float]:
    """Returns the time from the first step to the end as a fraction of the budget, and the fraction spent training."""
    with tempfile.TemporaryDirectory() as name:
        command = (OUR_COMMAND, "demo", "--budget", f"{budget_s:g}s")
        in_a_process(*command, threads=threads, folder=Path(name), forks=False)
        (run,) = (Path(name) / "runs").iterdir()
        records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    done = Run({}, records, None)
    first, trained_s = done.steps[0], done.step_s * done.steps[-1]["step"]
    whole_s = records[-1]["time_s"] - first["time_s"] + first["step"] * first["step_s"]
    return whole_s / budget_s, trained_s / whole_s


def main() -> None:
    options = arguments(__doc__, rounds=(3, 1), only=("", "demo-digits"), budget=(20.0, 20.0))
    about("time_foretold")
    threads: int = options.threads
    for recipe, lengths in LENGTHS.items():
        if not options.only or recipe in options.only.split(","):
            for until in lengths[:1] if options.quick else lengths:
                short = ("until=3steps", SMALL) if options.quick else (until, ())
                measured(recipe, short[0], threads, options.rounds, short[1], forks=options.quick)
    if options.quick:  # the demo would need another process
        return
    whole, trained = zip(*[demo_budget(threads, options.budget) for _ in range(options.rounds)])
    figure("time_foretold", "demo_budget", whole, unit="ratio", against=f"--budget {options.budget:g}s")
    figure("time_foretold", "demo_training", trained, unit="ratio", against="the time from the first step to the end")


if __name__ == "__main__":
    main()
