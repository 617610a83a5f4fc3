"""The doctor's scores for every fault and healthy run of the zoo under ``tw.watch``, by group.

    python -m benchmarks.zoo [--group D|L|M|I|O|G|P|S|A|T|K|H] [--only D01,L05] [--seeds 5] [--jobs 2] [--json] [--show]

recall: an alarm (warning or critical) after the fault is active, and none before. top1, top3: the right diagnosis is
first, or among the first three. location: module, op, micro-batch and sample ids are exact, for non-finite faults.
in_time: within the delay of the fault's class (non-finite 0 steps, structural 1, behaviour 50, memory 200; divergence:
3 steps before the loss doubles, or at its first step). tried: the remedy was tried in a replay, for faults in model,
data or configuration. Healthy runs (H): critical findings, and warnings per 10,000 steps.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

if not __package__:
    sys.exit("run it as a module, python -m benchmarks.zoo: run by its path it hides the package zoo")

from zoo import judge


def main() -> None:
    """Prints one line for each group, and one for all faults."""
    options = _arguments()
    names = [n for n, e in sorted(judge.load().items()) if e.group in options.group or not options.group]
    names = [n for n in names if not options.only or n in options.only.split(",")]
    jobs = [(name, seed) for name in names for seed in range(options.seeds)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        scores = []
        for score in pool.map(judge.one, *zip(*jobs)):
            scores.append(score)
            if options.show:
                print(json.dumps(score) if options.json else _line(score), flush=True)
    groups = sorted({score["id"][0] for score in scores})
    tables = [_healthy(scores) if g == "H" else _faults(g, [s for s in scores if s["id"][0] == g]) for g in groups]
    faulty = [s for s in scores if s["id"][0] != "H"]
    if faulty and len(groups) > 1:
        tables.append(_faults("all", faulty))
    for table in tables:
        print(json.dumps(table) if options.json else "  ".join(f"{k} {v}" for k, v in table.items()))


def _arguments() -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("--group", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--show", action="store_true", help="a line for each run")
    return parser.parse_args()


def _line(score: dict[str, Any]) -> str:
    right = "miss" if score["rank"] is None else f"#{score['rank'] + 1}"
    marks = f"delay {score['delay']} in time {score['in_time']} located {score['located']} tried {score['tried']}"
    return (
        f"{score['id']} seed {score['seed']} {right} {marks} {score['seconds']} s: {', '.join(score['said'][:5])}"
        + (f"  early {score['early']}" if score["early"] else "")
    )


def _faults(group: str, scores: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def share(good: Sequence[Any]) -> float | None:
        return round(sum(map(bool, good)) / len(good), 3) if good else None

    return {
        "group": group,
        "runs": len(scores),
        "recall": share([s["detected"] for s in scores]),
        "top1": share([s["rank"] == 0 for s in scores]),
        "top3": share([s["rank"] is not None and s["rank"] < 3 for s in scores]),
        "location": share([s["located"] for s in scores if s["located"] is not None]),
        "in_time": share([s["in_time"] for s in scores]),
        "tried": share([s["tried"] for s in scores if s["tried"] is not None]),
    }


def _healthy(scores: Sequence[dict[str, Any]]) -> dict[str, Any]:
    runs = [s for s in scores if s["id"][0] == "H"]
    steps = sum(s["steps"] for s in runs)
    return {
        "group": "H",
        "runs": len(runs),
        "critical": sum(len(s["critical"]) for s in runs),
        "warnings": sum(len(s["warned"]) for s in runs),
        "steps": steps,
        "warnings_per_10000_steps": round(1e4 * sum(len(s["warned"]) for s in runs) / max(1, steps), 2),
    }


if __name__ == "__main__":
    main()
