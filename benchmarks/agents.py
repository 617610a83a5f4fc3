"""How many planted faults can be solved from the answers of the MCP server alone.

    python -m benchmarks.agents [CASE ...] [--seed 0] [--unseen]

Each fault of ``zoo/reports/open`` (or each named one) is trained under ``tw.watch``. A client of the official SDK calls
``list_runs`` and ``diagnose_run`` without access to the program. The first finding is scored:

cause      its code and cause match the patterns of a correct diagnosis
line       a source line that it states (its own, or the call of its stage) is a correct line
near       a source line that it states is at most 3 lines from a correct line
place      a correct line, or the module or operation that it names is correct
excerpt    ``finding_evidence`` shows a correct line

``--unseen`` selects ten faults that were not used to develop the lines of findings. The first measurement, on
2026-11-30, had 9 correct causes and 4 correct lines. Three missing lines were added afterwards, so these faults are no
longer unseen.
"""

from __future__ import annotations

import argparse
import json
import linecache
import multiprocessing
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import torch
from mcp import Client
from mcp.types import TextContent

from benchmarks.figures import about, figure
from trainwright.agent.server import ServerOptions, make_server
from zoo.reports.case import Case, load
from zoo.reports.judge import is_at, is_named
from zoo.reports.run import run_here, warm_up
from zoo.reports.watches import Alarm, TrainwrightWatch

BENCH = "agents"
UNSEEN = (
    *("ctc_of_raw_logits", "freeze_typo", "key_mask_inverted", "metric_not_reset", "optimizer_of_old_model"),
    *("plateau_of_accuracy_in_min_mode", "sorted_classes", "stays_in_eval", "vae_reduction"),
    "zero_grad_per_micro_batch",
)
ASPECTS = ("cause", "line", "near", "place", "excerpt")
LINES_NEAR = 3
TIME_LIMIT_S = 120
_LINE = re.compile(r"[\w.-]+\.py:\d+")


def train(case: Case, seed: int, runs: Path) -> None:
    torch.set_num_threads(1)
    run_here(case, TrainwrightWatch(runs), seed, faulty=True)


async def answers(runs: Path, code: Path) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return the first finding above ``info`` of each run that has one, and its evidence."""
    found = []
    async with Client(make_server(ServerOptions(runs, code))) as client:

        async def ask(tool: str, **arguments: object) -> Any:
            content = (await client.call_tool(tool, arguments)).content[0]
            assert isinstance(content, TextContent)
            return json.loads(content.text)

        for run in sorted(each["run"] for each in (await ask("list_runs"))["runs"]):
            findings = (await ask("diagnose_run", run=run)).get("findings", [])
            wrong = [each for each in findings if each["severity"] != "info"]
            if wrong:
                found.append((wrong[0], await ask("finding_evidence", run=run, code=wrong[0]["code"])))
    return found


def right_lines(case: Case, lines: Sequence[str], near: int = 0) -> Iterator[str]:
    """Yield each ``file.py:7`` of ``lines`` whose source line, or one at most ``near`` lines from it, is correct."""
    patterns = [place.line for place in case.where if place.line]
    for each in lines:
        name, _, number = each.rpartition(":")
        numbers = range(int(number) - near, int(number) + near + 1) if name == case.file.name else ()
        texts = [linecache.getline(str(case.file), number) for number in numbers]
        if any(re.search(pattern, text) for pattern in patterns for text in texts):
            yield each


def solve(case: Case, seed: int) -> tuple[tuple[bool, ...], str]:
    """Return which ASPECTS are correct, and the answer as text."""
    with tempfile.TemporaryDirectory(prefix="agents-") as folder:
        process = multiprocessing.get_context("fork").Process(target=train, args=(case, seed, Path(folder)))
        process.start()
        process.join(TIME_LIMIT_S)
        if process.is_alive():
            process.kill()
        found = anyio.run(answers, Path(folder), case.file.parent)
    for finding, evidence in found:
        alarm = Alarm(finding["code"], finding["severity"], finding["step"], finding["what"], finding["cause"])
        lines = _LINE.findall(f"{finding.get('line', '')} {finding.get('shown_at', '')}")
        cause = is_named(case.diagnosis, alarm)
        is_right = any(right_lines(case, lines))
        names = {kind: re.search(rf"\\b{kind} ([^, ]+)", finding.get("where", "")) for kind in ("module", "op")}
        found_at: dict[str, Any] = {kind: name and name[1] for kind, name in names.items()}
        named = replace(alarm, **found_at)
        is_placed = is_right or any(is_at(place, named, case.file) for place in case.where if not place.line)
        marked = [each for each in evidence.get("lines", []) if each.startswith(">")]
        numbers = [re.search(r"\d+", each) for each in marked]
        excerpt = any(right_lines(case, [f"{case.file.name}:{each[0]}" for each in numbers if each]))
        text = ", ".join(
            f"{each} {linecache.getline(str(case.file), int(each.split(':')[1])).strip()}" for each in lines
        )
        if cause or finding is found[-1][0]:
            is_near = any(right_lines(case, lines, LINES_NEAR))
            right = (cause, cause and is_right, cause and is_near, cause and is_placed, cause and excerpt)
            return right, f"{finding['code']}: {text or 'no line'}"
    return (False,) * len(ASPECTS), "nothing found"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unseen", action="store_true")
    options = parser.parse_args()
    about(BENCH)
    warm_up()
    faults = [case for case in load("open") if case.is_fault and case.ranks == 1]
    wanted = [case for case in faults if (case.id in UNSEEN) is options.unseen]
    wanted = [case for case in faults if case.id in options.cases] if options.cases else wanted
    made = []
    for case in wanted:
        right, said = solve(case, options.seed)
        made.append(right)
        words = " ".join(f"{name} {'yes' if each else 'no':<3}" for name, each in zip(ASPECTS, right))
        sys.stdout.write(f"{case.id:<36} {words}  {said}\n")
        sys.stdout.flush()
    for index, name in enumerate(ASPECTS):
        figure(BENCH, name, [sum(each[index] for each in made)], unit="faults", against=f"of {len(made)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
