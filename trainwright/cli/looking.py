"""The verbs that show runs: as a file, side by side, or live."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.app import Json, answer, verb

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")]


@verb()
def report(
    runs: Runs,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to; else into the run folder.")] = None,
    as_json: Json = False,
) -> None:
    """Write a run, or several side by side, as one HTML file that needs nothing else and can be sent."""
    from trainwright.pages.report import write_report

    answer(write_report(runs, out), as_json)


@verb()
def compare(
    runs: Runs,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it as a page, with the curves, too.")] = None,
    as_json: Json = False,
) -> None:
    """Say what differs between runs: first what was asked, then what came of it, with the spread over seeds."""
    from trainwright.errors import UsageError
    from trainwright.pages.compare import RunComparison
    from trainwright.pages.report import write_report
    from trainwright.pages.view import RunView

    if len(runs) < 2:
        raise UsageError("compare takes two runs or more", remedy="trainwright compare runs/a runs/b")
    comparison = RunComparison.of([RunView.read(path) for path in runs])
    if html is not None:
        write_report(runs, html)
    answer(comparison, as_json)
