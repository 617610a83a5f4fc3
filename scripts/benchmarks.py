"""Keeps the newest figures of each benchmark in benchmarks/results/, and prints the page that shows them.

.venv/bin/python -m benchmarks.startup > figures.jsonl
python scripts/benchmarks.py keep figures.jsonl     # writes benchmarks/results/startup.json
python scripts/benchmarks.py page > docs/reference/benchmarks.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
HEAD = """# Benchmarks

The newest figures of each benchmark. The command above a table takes them again, on any machine; the files are
`benchmarks/results/NAME.json`, with the versions of all packages. A ratio compares with what is named beside it, in the
same run; the range is over the rounds. `python scripts/benchmarks.py page` prints this page.
"""
KEPT = ("date", "command", "python", "versions", "machine", "cores", "load")


def keep(lines: Iterable[str]) -> Iterator[Path]:
    """Writes the output lines of benchmarks into one file per benchmark. Replaces earlier runs of the same command."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for line in filter(None, map(str.strip, lines)):
        figure = json.loads(line)
        if "command" in figure:
            run = {key: figure[key] for key in KEPT if key in figure} | {"figures": []}
            runs.setdefault(figure["bench"], []).append(run)
        else:
            runs[figure["bench"]][-1]["figures"].append({key: each for key, each in figure.items() if key != "bench"})
    for bench, found in runs.items():
        path = RESULTS / f"{bench}.json"
        before = json.loads(path.read_text())["runs"] if path.exists() else []
        commands = {run["command"] for run in found}
        kept = [run for run in before if run["command"] not in commands] + found
        path.write_text(json.dumps({"bench": bench, "runs": kept}, indent=1) + "\n")
        yield path


def page(paths: Sequence[Path]) -> str:
    read = {path.stem: json.loads(path.read_text())["runs"] for path in paths}
    return HEAD + "".join(f"\n## {bench}\n{''.join(map(_run, runs))}" for bench, runs in read.items())


def _run(run: dict[str, Any]) -> str:
    torch = run["versions"].get("torch", "version not recorded")
    where = f"{run['date'][:10]}, torch {torch}, {run.get('machine') or 'CPU'}, {run['cores']} cores"
    head = "| case | median | unit | compared with | range |\n|---|---|---|---|---|\n"
    return f"\n`{run['command']}`, {where}\n\n{head}{''.join(map(_row, run['figures']))}"


def _row(figure: dict[str, Any]) -> str:
    shown = ("case", "value", "unit", "against", "n", "spread")
    extra = "".join(f"; {key} {each}" for key, each in figure.items() if key not in shown)
    value = "none" if figure.get("value") is None else figure["value"]
    spread = " to ".join(map(str, figure.get("spread") or ()))
    cells = (figure.get("case", ""), value, figure.get("unit", ""), f"{figure.get('against', '')}{extra}", spread)
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |\n"


def main() -> None:
    """``keep FILE...`` or ``page``."""
    match sys.argv[1:]:
        case ["keep", first, *others]:
            for name in (first, *others):
                for path in keep(Path(name).read_text().splitlines()):
                    sys.stdout.write(f"{path}\n")
        case ["page"]:
            sys.stdout.write(page(sorted(RESULTS.glob("*.json"))))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
