"""Run faults from public reports and judge what is found in them.

    python -m zoo.reports --watch null --twins         # each fault shows its symptom, and no repaired twin does
    python -m zoo.reports --watch trainwright --twins --half open --seeds 0 1
    python -m zoo.reports --list

The exit status is 1 if a case could not run, or if a symptom is missing or is in a twin.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import torch

from zoo.reports.case import HALVES, Case, load
from zoo.reports.judge import Row, totals
from zoo.reports.run import run_apart, warm_up

PRINT = sys.stdout.write


def chosen(halves: Sequence[str], names: Sequence[str]) -> list[Case]:
    """Cases by id, by stage, ``faults`` or ``healthy``; all cases if there are no names."""
    cases = [case for half in HALVES if half in halves for case in load(half)]
    known = {"faults", "healthy"}.union(*({case.id, case.stage} for case in cases))
    if unknown := set(names) - known:
        raise SystemExit(f"no case or stage is called {', '.join(sorted(unknown))}; --list prints all")
    return [
        case
        for case in cases
        if not names or {case.id, case.stage, "faults" if case.is_fault else "healthy"} & set(names)
    ]


def yes(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"


def line(row: Row) -> str:
    head = f"{row.name:<44} {row.seed:>2} {row.seconds:>5.1f} s"
    if row.outcome is None:
        return f"{head}  DID NOT RUN\n{row.error}"
    if row.verdict is None or not row.as_expected:
        expected = "ok" if row.as_expected else "SYMPTOM IS MISSING" if row.faulty else "NOT HEALTHY"
        numbers = " ".join(f"{name}={value}" for name, value in row.outcome.numbers.items())
        head = f"{head}  {expected}  {len(row.outcome.losses)} losses  {numbers}"
    verdict = row.verdict
    if verdict is None:
        return head
    alarms = ", ".join([*verdict.criticals, *verdict.warnings]) or "no alarm"
    if not row.faulty:
        return f"{head}  {alarms}"
    early = f"  before the onset: {', '.join(verdict.early)}" if verdict.early else ""
    return (
        f"{head}  detected {yes(verdict.detected):<3} in time {yes(verdict.in_time):<3} "
        f"({verdict.first_step} of {verdict.due_step}) named first {yes(verdict.named_first):<3} "
        f"named {yes(verdict.named):<3} placed {yes(verdict.placed):<3} {alarms}{early}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="ids, stages, 'faults' or 'healthy'; default: all")
    parser.add_argument("--watch", choices=("null", "trainwright"), default="null")
    parser.add_argument("--half", choices=(*HALVES, "both"), default="open")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--twins", action="store_true", help="also run the repaired twin of each fault")
    parser.add_argument("--json", action="store_true", help="print one JSON document with all findings")
    parser.add_argument("--list", action="store_true", help="only list the cases")
    options = parser.parse_args()

    cases = chosen(HALVES if options.half == "both" else [options.half], options.cases)
    if options.list:
        for case in cases:
            PRINT(f"{case.id:<32} {case.stage or 'healthy':<11} {case.title}  [{', '.join(case.sources)}]\n")
        return 0
    torch.set_num_threads(1)
    warm_up()
    rows: list[Row] = []
    for seed in options.seeds:
        for case in cases:
            for faulty in (True, False) if case.is_fault and options.twins else (case.is_fault,):
                rows.append(run_apart(case, options.watch, seed, faulty=faulty))
                if not options.json:
                    PRINT(f"{line(rows[-1])}\n")
                    sys.stdout.flush()
    failed = [row for row in rows if not row.as_expected]
    if options.json:
        PRINT(
            json.dumps({"rows": [row.to_json() for row in rows], "totals": totals(rows)}, indent=1, default=str) + "\n"
        )
    else:
        for title, rates in totals(rows).items():
            PRINT(f"{title:<12} {'  '.join(f'{name} {value}' for name, value in rates.items())}\n")
        PRINT(f"{len(rows)} runs; not as expected: {', '.join(row.name for row in failed) or 'none'}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
