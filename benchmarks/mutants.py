"""The doctor on faults that nobody has listed: mutants of ten healthy programs under ``tw.watch``.

    python -m benchmarks.mutants [--kept-out | --wide | --further] [--only PATTERN] [--part 0.25] [--seeds 1] [--jobs 2]
                                 [--missed] [--json]
    python -m benchmarks.mutants --twins [--further]      the programs unchanged: any alarm is a false one
    python -m benchmarks.mutants --healthy [--kept-out]   healthy programs with legal techniques: likewise
    python -m benchmarks.mutants --judge [--wide | --further]   measures again which mutants do harm (zoo/mutants.json)

detected: a warning or worse that the same program unchanged does not have. right: its family fits what was changed,
and its module does where the model was; or it points at the line. line: at most two lines away. A third of the pairs of
operator and host is kept out: it is measured at the end of a piece of work, and nothing is written to please it. --wide
takes further sites of the open pairs (zoo/mutants_wide.json), to write laws by. --further takes five further programs
(zoo/further), which were written after the laws, by somebody else: 32 of their 69 mutants (0.46) were found at first
sight, at commit 1d0ac1e.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import multiprocessing
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

if not __package__:
    sys.exit("run it as a module, python -m benchmarks.mutants: run by its path it hides the package zoo")

from zoo import mutant_bed, programs
from zoo.mutant_bed import Score
from zoo.mutant_runs import Watched
from zoo.mutate import FURTHER, HOSTS
from zoo.mutation_operators import OPERATORS


def main() -> None:
    """Prints a line for the part, for each effect, for each host and for each operator."""
    options = _arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        if options.judge:
            _judge(pool, options.only, options.wide, options.further)
        elif options.twins or options.healthy:
            _healthy(pool, options)
        else:
            _mutants(pool, options)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--kept-out", action="store_true", help="the third that is for the end")
    part.add_argument("--wide", action="store_true", help="further sites of the other two thirds")
    part.add_argument("--further", action="store_true", help="five programs written after the laws")
    parser.add_argument("--twins", action="store_true")
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("--judge", action="store_true")
    parser.add_argument("--only", default="*", help="pattern of names, host:operator:site")
    parser.add_argument("--part", type=float, default=1.0, help="a share of the mutants, the same each time")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--missed", action="store_true", help="a line for each mutant that was not detected")
    parser.add_argument("--json", action="store_true", help="a line for each run")
    return parser.parse_args()


def _mutants(pool: ProcessPoolExecutor, options: argparse.Namespace) -> None:
    bed = mutant_bed.bed(kept_out=options.kept_out, wide=options.wide, further=options.further)
    names = [name for name in bed if fnmatch.fnmatch(name, options.only)]
    names = [name for name in names if _share(name) < options.part]
    if not names:
        sys.exit("no mutant has such a name")
    jobs = [(name, seed) for name in names for seed in range(options.seeds)]
    hosts = sorted({(name.split(":")[0], seed) for name, seed in jobs})
    known = {
        one: {each.code for each in seen.alarms} for one, seen in zip(hosts, pool.map(mutant_bed.twin, *zip(*hosts)))
    }
    scores = []
    running = [pool.submit(mutant_bed.score, name, seed, known[name.split(":")[0], seed]) for name, seed in jobs]
    for score in (each.result() for each in running):
        scores.append(score)
        if options.json:
            print(json.dumps(score.to_json()), flush=True)
        elif options.missed and not score.detected:
            print(_line(score), flush=True)
    part = next((name for name in ("kept_out", "wide", "further") if getattr(options, name)), "open")
    print(_table(part.replace("_", " "), scores))
    for of in (lambda each: each.effect, lambda each: f"host {each.host}", lambda each: f"operator {each.operator}"):
        for row in _rows(scores, of):
            print(row)
    failed = [f"{each.name}: {each.error}" for each in scores if each.error]
    print("\n".join(["failed or raised under the watch:", *failed]) if failed else "nothing failed")


def _share(name: str) -> float:
    return int(hashlib.sha256(f"part {name}".encode()).hexdigest()[:8], 16) / 2**32


def _line(score: Score) -> str:
    said = ", ".join(score.said[:4]) or "nothing"
    return f"{score.name} seed {score.seed}\n    {score.diff}\n    harm: {score.harm}; said: {said}"


def _table(title: str, scores: Sequence[Score]) -> str:
    def share(good: Iterable[bool]) -> str:
        values = list(good)
        return f"{sum(values) / len(values):.3f}" if values else "-"

    shares = {what: share(getattr(each, what) for each in scores) for what in ("detected", "right", "line")}
    return f"{title:22} runs {len(scores):4}  " + "  ".join(f"{what} {value}" for what, value in shares.items())


def _rows(scores: Sequence[Score], of: Callable[[Score], str]) -> Iterator[str]:
    groups = defaultdict(list)
    for score in scores:
        groups[of(score)].append(score)
    return (_table(name, group) for name, group in sorted(groups.items()))


def _healthy(pool: ProcessPoolExecutor, options: argparse.Namespace) -> None:
    """Any alarm is a false one. A program counts once, whatever the number of its warnings."""
    hosts = FURTHER if options.further else HOSTS
    names = hosts if options.twins else programs.programs(kept_out=options.kept_out)
    chosen = [name for name in names if fnmatch.fnmatch(name, options.only) and _share(name) < options.part]
    jobs = [(name, seed) for name in chosen for seed in range(options.seeds)]
    run = mutant_bed.twin if options.twins else programs.watched
    critical, warned, failed = 0, 0, 0
    for (name, seed), seen in zip(jobs, pool.map(run, *zip(*jobs))):
        severities = {each.severity for each in seen.found}
        critical, warned = critical + ("critical" in severities), warned + ("warning" in severities)
        failed += bool(seen.error or seen.failures)
        if options.json or seen.alarms or seen.error or seen.failures:
            print(_alarms(name, seed, seen), flush=True)
    print(f"healthy runs {len(jobs)}  with a critical {critical}  with a warning {warned}  failed {failed}")


def _alarms(name: str, seed: int, seen: Watched) -> str:
    said = ", ".join(f"{each.code}@{each.step} ({each.severity}): {each.symptom}" for each in seen.alarms)
    return f"{name} seed {seed}  {seen.seconds} s: {said} {seen.error or ''} {' '.join(seen.failures)}".rstrip()


def _judge(pool: ProcessPoolExecutor, only: str, wide: bool, further: bool) -> None:
    """One task for each host, whose own runs are needed once."""
    hosts = FURTHER if further else HOSTS
    chosen = {host: [each for each in OPERATORS if fnmatch.fnmatch(f"{host}:{each}", only)] for host in hosts}
    found = {name: [each.kind, each.why] for name, each in mutant_bed.judged(wide=wide, further=further).items()}
    running = {pool.submit(mutant_bed.judge, host, chosen[host], wide): host for host in hosts if chosen[host]}
    for done in as_completed(running):
        host, new = running[done], done.result()
        kept = {name: each for name, each in found.items() if not fnmatch.fnmatch(name.rpartition(":")[0], only)}
        found = {name: each for name, each in found.items() if name.split(":")[0] != host or name in kept} | new
        mutant_bed.store(found, [host] if len(chosen[host]) == len(OPERATORS) else [], wide=wide, further=further)
        print(host, dict(Counter(kind for kind, _ in new.values())), flush=True)


if __name__ == "__main__":
    main()
