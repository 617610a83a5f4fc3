"""Healthy programs in the idioms of well-known public repositories, with and without the watch.

    python -m benchmarks.public [--half open|held_out] [--only mnist,gin] [--seeds 2] [--jobs 1] [--json] [--null]

Every run is a process. The two runs of a program and a seed must agree in every bit of the weights, buffers, optimizer
states and losses, in the states of the random generators, in the written files, in the printed lines (except times), in
the warnings, and in pickles and copies of the model. The watch must report no warning or critical finding. Prints a
line for each program, and below it each difference and each alarm.

``--null`` compares two runs without the watch, to show that the program is deterministic and learns.

The held-out half (see ``zoo/public/__init__.py``) is measured only once, when a change of the doctor is complete.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

if not __package__:
    sys.exit("run it as a module, python -m benchmarks.public: run by its path it hides the package zoo")

import torch

from zoo.public import HELD_OUT, KINDS, OPEN, compare

SEVERITY = {"warning": "warning", "critical": "CRITICAL"}


def main() -> None:
    """Prints one line for each program and one for all."""
    os.environ.setdefault("PYTHONHASHSEED", "0")  # peft writes a set of names into a file
    options = _arguments()
    names = options.only.split(",") if options.only else list(OPEN if options.half == "open" else HELD_OUT)
    known = {name for kind in KINDS.values() for name in kind.split()}
    if unknown := sorted(set(names) - known):
        sys.exit(f"no public program is named {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    print(f"{'program':24} {'steps':>6} {'wall s':>7} {'ratio':>6} {'cpu':>6} {'alarms':>7} {'differences':>12}")
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        tasks = [(name, options.seeds, not options.null) for name in names]
        rows = []
        for row in pool.map(_program, *zip(*tasks)):
            rows.append(row)
            _show(row, options.json)
    _show_all(rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--half", choices=["open", "held_out"], default="open")
    parser.add_argument("--only", default="", help="names of programs, of either half")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="a line of JSON for each program, with every finding")
    parser.add_argument("--null", action="store_true", help="two runs without the watch")
    return parser.parse_args()


def _program(name: str, seeds: int, watched: bool) -> dict[str, Any]:
    """Makes both runs of each seed, one after the other, in new processes and the same folder. Returns the results."""
    row: dict[str, Any] = {"program": name, "wall_s": [], "ratio": [], "cpu_ratio": [], "alarms": [], "differences": []}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            runs = [_in_a_process(name, seed, Path(folder) / "run", with_watch) for with_watch in (False, watched)]
        plain, second = runs
        if isinstance(plain, str) or isinstance(second, str):
            failed = plain if isinstance(plain, str) else second
            row["differences"].append(f"seed {seed}: failed: {failed}")
            continue
        row |= {"steps": plain.steps, "result": plain.result, "learned": plain.learned and second.learned}
        row["wall_s"].append(plain.wall_s)
        row["ratio"].append(second.wall_s / plain.wall_s)
        row["cpu_ratio"].append(second.cpu_s / plain.cpu_s)
        row["alarms"] += [{"seed": seed, **each} for each in compare.alarms(second)]
        row["differences"] += [f"seed {seed}: {each}" for each in compare.differences(plain, second)]
        if not row["learned"]:
            row["differences"].append(f"seed {seed}: did not learn: {plain.result}")
    return row


def _in_a_process(name: str, seed: int, place: Path, watched: bool) -> compare.Run | str:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            run: compare.Run | str = pool.submit(_run, name, seed, place, watched).result()
        except Exception as error:
            run = f"{type(error).__name__}: {error}"
    for path in sorted(place.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    return run


def _run(name: str, seed: int, place: Path, watched: bool) -> compare.Run:
    torch.set_num_threads(1)
    return compare.run(name, seed, place, watched)


def _show(row: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(row, default=str), flush=True)
        return
    wall_s, ratio, cpu = (statistics.median(row[key] or [float("nan")]) for key in ("wall_s", "ratio", "cpu_ratio"))
    print(
        f"{row['program']:24} {row.get('steps', 0):6} {wall_s:7.1f} {ratio:6.2f} {cpu:6.2f} "
        f"{len(row['alarms']):7} {len(row['differences']):12}"
    )
    for each in row["differences"]:
        print(f"    differs: {each}")
    for each in row["alarms"]:
        where = f"{SEVERITY[each['severity']]} seed {each['seed']}: {each['code']} at step {each['step']}"
        print(f"    {where}: {each['symptom']}")
    sys.stdout.flush()


def _show_all(rows: list[dict[str, Any]]) -> None:
    quiet = sum(not row["alarms"] for row in rows)
    same = sum(not row["differences"] for row in rows)
    alarms = [each for row in rows for each in row["alarms"]]
    critical = sum(each["severity"] == "critical" for each in alarms)
    ratios = [ratio for row in rows for ratio in row["ratio"]] or [float("nan")]
    print(
        f"{len(rows)} programs: {quiet} without an alarm ({len(alarms) - critical} warnings, {critical} critical), "
        f"{same} without a difference, median ratio {statistics.median(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
