"""Compares a sweep of 24 trials that is killed five times with an undisturbed one, and two parallel trials with one.

    python -m benchmarks.sweep kills [--trials 24] [--kills 5]
    python -m benchmarks.sweep speed [--trials 8] [--pairs 3]

Each prints two JSON lines: the machine, and the result. The trials are processes, as users run them; their models are
tiny. Further options of the sweep follow after ``--``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.figures import about

POINTS = """
import torch

def points(size):
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(size))
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
"""
RECIPE = """
until: {steps}steps
device: cpu
model: {{use: mlp, args: {{sizes: [8, 8, 2]}}}}
data: {{train: {{use: "points:points", args: {{size: 64}}}}, val: {{use: "points:points", args: {{size: 32}}}}}}
batch: {{size: 8}}
optimizer: {{use: sgd, lr: 0.1}}
evaluation: {{every: 4steps}}
checkpoint: {{every: 10steps}}
log: {{every: 1steps, doctor: false}}
"""
OVER = ("optimizer.lr=log:1e-3..1", "seed=0..100")


def prepare(folder: Path, *, steps: int = 40) -> Path:
    """Writes the recipe and its data. Returns the path of the recipe."""
    (folder / "points.py").write_text(POINTS)
    (folder / "recipe.yaml").write_text(RECIPE.format(steps=steps))
    return folder / "recipe.yaml"


def command(recipe: Path, name: str, trials: int, *options: str) -> list[str]:
    over = [word for each in OVER for word in ("--over", each)]
    where = ["--name", name, "--folder", str(recipe.parent)]
    return [sys.executable, "-m", "trainwright", "sweep", str(recipe), *over, "--trials", str(trials), *where, *options]


def table(folder: Path) -> list[tuple[Any, ...]]:
    """Returns the columns of a sweep's table that do not depend on the clock, best trial first."""
    rows = json.loads((folder / "sweep.json").read_text())["trials"]
    return [(row["trial"], sorted(row["params"].items()), row["value"], row["steps"], row["ended"]) for row in rows]


def killed(arguments: list[str], kills: int, seed: int, *, longest_s: float) -> int:
    """Starts a command until it ends, and kills it up to ``kills`` times before. Returns the number of kills."""
    draw = random.Random(seed)
    for done in range(kills):
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(draw.uniform(0.5, longest_s))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        else:
            return done
    subprocess.run(arguments, stdout=subprocess.DEVNULL, check=True)
    return kills


def run_kills(trials: int, kills: int, seed: int, options: list[str]) -> dict[str, Any]:
    """Compares the tables of a sweep that is killed and of one that is not."""
    with tempfile.TemporaryDirectory() as text:
        recipe = prepare(Path(text))
        began_s = time.monotonic()
        subprocess.run(command(recipe, "undisturbed", trials, *options), stdout=subprocess.DEVNULL, check=True)
        took_s = time.monotonic() - began_s
        times = killed(command(recipe, "killed", trials, *options), kills, seed, longest_s=2 * took_s / (kills + 1))
        expected, seen = table(recipe.parent / "undisturbed"), table(recipe.parent / "killed")
        journal = recipe.parent / "killed" / "journal.log"
        return {
            "bench": "sweep",
            "case": "kills",
            "trials": trials,
            "kills": times,
            "same_table": seen == expected,
            "journal_lines": len(journal.read_text().splitlines()),
            "undisturbed_s": round(took_s, 1),
            "different": [pair for pair in zip(expected, seen, strict=False) if pair[0] != pair[1]][:3],
        }


def run_speed(trials: int, pairs: int) -> dict[str, Any]:
    """Measures sweeps with one trial at a time and with two, in alternating order."""
    seconds: dict[str, list[float]] = {"1": [], "2": []}
    with tempfile.TemporaryDirectory() as text:
        recipe = prepare(Path(text), steps=400)
        for pair in range(pairs):
            for jobs, found in seconds.items():
                options = ["--sampler", "random", "--jobs", jobs]
                began_s = time.monotonic()
                arguments = command(recipe, f"jobs-{jobs}-{pair}", trials, *options)
                subprocess.run(arguments, stdout=subprocess.DEVNULL, check=True)
                found.append(round(time.monotonic() - began_s, 2))
        same = table(recipe.parent / "jobs-1-0") == table(recipe.parent / "jobs-2-0")
    return {
        "bench": "sweep",
        "case": "speed",
        "trials": trials,
        "ratio": round(statistics.median(one / two for one, two in zip(seconds["1"], seconds["2"], strict=True)), 2),
        "one_at_a_time_s": seconds["1"],
        "two_s": seconds["2"],
        "same_table": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kills", "speed"))
    parser.add_argument("--trials", type=int, default=0)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("options", nargs="*", help="further options of the sweep, after --")
    given = parser.parse_args()
    about("sweep")
    if given.what == "kills":
        options = given.options or ["--sampler", "random", "--jobs", "2"]
        print(json.dumps(run_kills(given.trials or 24, given.kills, given.seed, options)))
    else:
        print(json.dumps(run_speed(given.trials or 8, given.pairs)))


if __name__ == "__main__":
    main()
