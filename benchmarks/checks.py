"""For each check of the doctor: the numbers of right and wrong alarms over faults and healthy programs.

    python -m benchmarks.checks [--beds catalogue,reports,public] [--seeds 1] [--jobs 2] [--json runs.jsonl]
    python -m benchmarks.checks --read runs.jsonl [more.jsonl ...]

Beds: ``catalogue`` is the list of named faults with its healthy runs (``zoo``), ``reports`` the open half of the faults
from public reports, with their repaired twins and the healthy programs beside them (``zoo.reports``), ``public`` the
open half of the healthy public programs (``zoo.public``).

Columns, each a number of runs:

- fires: the check raised an alarm, that is a warning or a critical finding.
- right: the alarm is the diagnosis of the fault in the run.
- unique: the alarm is right, and no other check is right in that run.
- wrong: the program is healthy.

A check with 0 in ``right`` has no known use. ``--json`` appends the runs to a file, one per line, from which ``--read``
prints the table again, also for several files.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

if not __package__:
    sys.exit("run it as a module, python -m benchmarks.checks: run by its path it hides the package zoo")

from typing import Any

import torch

from trainwright.doctor.discovery import all_checks
from zoo import judge as catalogue
from zoo import public
from zoo.public import compare
from zoo.reports.case import load
from zoo.reports.judge import is_named
from zoo.reports.run import run_apart, warm_up

BEDS = ("catalogue", "reports", "public")
HEALTHY_GROUP = "H"


@dataclass(frozen=True)
class Run:
    """The alarms of one run. ``right``: those that name its fault. ``error``: why it did not run; None if it did."""

    bed: str
    name: str
    seed: int
    is_faulty: bool
    alarms: tuple[str, ...] = ()
    right: tuple[str, ...] = ()
    error: str | None = None


def main() -> None:
    options = _arguments()
    if options.read:
        runs = [_run_of(json.loads(line)) for path in options.read for line in path.read_text().splitlines()]
    else:
        runs = []
        for run in _all_runs(options.beds.split(","), options.seeds, options.jobs):
            runs.append(run)
            if options.json:
                with options.json.open("a") as out:
                    out.write(json.dumps(asdict(run)) + "\n")
    for line in table(runs):
        print(line)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beds", default=",".join(BEDS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="append each run to this file")
    parser.add_argument("--read", type=Path, nargs="+", help="print the table of these files, and run nothing")
    options = parser.parse_args()
    if unknown := set(options.beds.split(",")) - set(BEDS):
        parser.error(f"no bed is called {', '.join(sorted(unknown))}; there are {', '.join(BEDS)}")
    return options


def _run_of(values: dict[str, Any]) -> Run:
    plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return Run(**plain)


def _all_runs(beds: Sequence[str], seeds: int, jobs: int) -> Iterator[Run]:
    tasks: list[tuple[str, str, int]] = []
    for seed in range(seeds):
        if "catalogue" in beds:
            tasks += [("catalogue", name, seed) for name in sorted(catalogue.load())]
        if "reports" in beds:
            tasks += [("reports", name, seed) for case in load("open") for name in _variants(case.id, case.is_fault)]
        if "public" in beds:
            tasks += [("public", name, seed) for name in public.OPEN]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        yield from pool.map(_one, tasks)


def _variants(name: str, is_fault: bool) -> tuple[str, ...]:
    return (name, f"{name}{TWIN}") if is_fault else (name,)


TWIN = " (repaired)"


def _one(task: tuple[str, str, int]) -> Run:
    bed, name, seed = task
    torch.set_num_threads(1)
    try:
        return {"catalogue": _of_catalogue, "reports": _of_reports, "public": _of_public}[bed](name, seed)
    except Exception as error:
        return Run(bed, name, seed, False, error=f"{type(error).__name__}: {error}")


def _of_catalogue(name: str, seed: int) -> Run:
    entry = catalogue.load()[name]
    score, found = catalogue.run(entry, seed)
    alarms = tuple(each.code for each in found if each.severity in ("critical", "warning"))
    right = tuple(code for code in alarms if code in entry.labels)
    return Run("catalogue", name, seed, entry.group != HEALTHY_GROUP, alarms, right, score.error)


def _of_reports(name: str, seed: int) -> Run:
    case = next(each for each in load("open") if each.id == name.removesuffix(TWIN))
    faulty = case.is_fault and not name.endswith(TWIN)
    warm_up()
    row = run_apart(case, "trainwright", seed, faulty=faulty)
    alarms = [each for each in row.alarms if each.severity in ("critical", "warning")]
    right = tuple(each.code for each in alarms if faulty and is_named(case.diagnosis, each))
    return Run("reports", name, seed, faulty, tuple(each.code for each in alarms), right, row.error)


def _of_public(name: str, seed: int) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        run = compare.run(name, seed, Path(folder) / "run", watched=True)
    return Run("public", name, seed, False, tuple(each["code"] for each in compare.alarms(run)))


def table(runs: Sequence[Run]) -> Iterator[str]:
    """Yields the rows of the checks, sorted by their number of unique right alarms, and a summary."""
    fires, right, unique, wrong = (Counter[str]() for _ in range(4))
    for run in runs:
        fires.update(set(run.alarms))
        right.update(set(run.right))
        if len(set(run.right)) == 1:
            unique.update(run.right[:1])
        if not run.is_faulty:
            wrong.update(set(run.alarms))
    sizes = {each.code: _lines(inspect.getsourcefile(each.judge)) for each in all_checks()}
    codes = sorted({*sizes, *fires}, key=lambda code: (-unique[code], -right[code], wrong[code], code))
    yield f"{'check':44} {'lines':>6} {'fires':>6} {'right':>6} {'unique':>7} {'wrong':>6}"
    for code in codes:
        yield (f"{code:44} {sizes.get(code, 0):6} {fires[code]:6} {right[code]:6} {unique[code]:7} {wrong[code]:6}")
    yield from _summary(runs)


def _lines(path: str | None) -> int:
    return len(Path(path).read_text().splitlines()) if path else 0


def _summary(runs: Sequence[Run]) -> Iterator[str]:
    for bed in BEDS:
        faulty = [run for run in runs if run.bed == bed and run.is_faulty]
        healthy = [run for run in runs if run.bed == bed and not run.is_faulty]
        if faulty or healthy:
            yield (
                f"{bed}: {sum(bool(run.right) for run in faulty)} of {len(faulty)} faults named, "
                f"{sum(bool(run.alarms) for run in faulty)} with an alarm; "
                f"{sum(bool(run.alarms) for run in healthy)} of {len(healthy)} healthy runs with an alarm"
            )
    for run in runs:
        if run.is_faulty and not run.right:
            yield f"not named: {run.bed} {run.name} seed {run.seed}: {', '.join(run.alarms) or 'no alarm'}"
        elif not run.is_faulty and run.alarms:
            yield f"false alarm: {run.bed} {run.name} seed {run.seed}: {', '.join(run.alarms)}"
        if run.error:
            yield f"error: {run.bed} {run.name} seed {run.seed}: {run.error.strip().splitlines()[-1]}"


if __name__ == "__main__":
    main()
