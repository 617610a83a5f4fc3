"""Whether each law holds where it should: ten healthy programs under ``tw.watch``, in three dtypes, over seeds.

    python -m benchmarks.laws [--seeds 20] [--dtypes fp32 bf16 fp16] [--only HOST] [--jobs 2]

Under bf16 and fp16 the whole program runs under autocast, also what its author wrote for fp32, without its cache of
weights, which would be that of the first step. For each law: in how
many runs it held, was broken, did not apply or was not looked at, and in how many of the programs it held.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import multiprocessing
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

if not __package__:
    sys.exit("run it as a module, python -m benchmarks.laws: run by its path it hides the package zoo")

from trainwright.doctor.law import OF_LAWS
from zoo.mutant_runs import Watched, watched_mutant
from zoo.mutate import HOSTS

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
STATES = ("held", "broken", "not applicable", "not looked at")
Run = tuple[str, str, int]
"""Program, dtype, seed."""


def main() -> None:
    """Prints the alarms of each run, a line for each law, and a line for each dtype."""
    options = _arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    hosts = [host for host in HOSTS if fnmatch.fnmatch(host, options.only)]
    runs = list(itertools.product(hosts, options.dtypes, range(options.seeds)))
    if not runs:
        sys.exit("no program has such a name")
    seen: dict[Run, Watched] = {}
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for run, watched in zip(runs, pool.map(watch, *zip(*runs))):
            seen[run] = watched
            if watched.alarms or watched.error or watched.failures:
                print(_alarms(run, watched), flush=True)
    for line in (*_by_law(seen), *_by_dtype(seen)):
        print(line)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=list(DTYPES))
    parser.add_argument("--only", default="*", help="pattern of programs")
    parser.add_argument("--jobs", type=int, default=2)
    return parser.parse_args()


def watch(host: str, dtype: str, seed: int) -> Watched:
    """A healthy program under the watch."""
    with torch.autocast("cpu", DTYPES[dtype], enabled=dtype != "fp32", cache_enabled=False):
        return watched_mutant(None, host, seed)


def _alarms(run: Run, seen: Watched) -> str:
    said = ", ".join(f"{each.code}@{each.step} ({each.severity}): {each.symptom}" for each in seen.alarms)
    return f"{' '.join(map(str, run))}: {said} {seen.error or ''} {' '.join(seen.failures)}".rstrip()


def _by_law(seen: Mapping[Run, Watched]) -> list[str]:
    states: dict[str, Counter[str]] = defaultdict(Counter)
    hosts: dict[str, set[str]] = defaultdict(set)
    for (host, _, _), watched in seen.items():
        for law, state in watched.laws.items():
            states[law][state] += 1
            if state == "held":
                hosts[law].add(host)
    head = f"{'law':40} {'programs':>8} " + " ".join(f"{state:>14}" for state in STATES)
    rows = [
        f"{law:40} {len(hosts[law]):8} " + " ".join(f"{counts[state]:14}" for state in STATES)
        for law, counts in sorted(states.items())
    ]
    return [head, *rows]


def _by_dtype(seen: Mapping[Run, Watched]) -> list[str]:
    return [_summary(dtype, [each for run, each in seen.items() if run[1] == dtype]) for dtype in DTYPES]


def _summary(dtype: str, runs: Sequence[Watched]) -> str:
    critical = sum(any(each.severity == "critical" for each in run.found) for run in runs)
    warned = sum(any(each.severity == "warning" for each in run.found) for run in runs)
    laws = sum(any(each.code.startswith(OF_LAWS) for each in run.alarms) for run in runs)
    failed = sum(bool(run.error or run.failures) for run in runs)
    counts = f"with a critical {critical}  with a warning {warned}  of a law {laws}  failed {failed}"
    return f"healthy {dtype}  runs {len(runs)}  {counts}"


if __name__ == "__main__":
    main()
