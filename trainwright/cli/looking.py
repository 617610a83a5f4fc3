"""The verbs that show runs: as a file, side by side, or live."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.app import Json, answer, say_to, verb

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


@verb()
def serve(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUNS...]", help="Folders of runs, or single runs; else runs.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Else 8787, or a free one.")] = None,
    host_names: Annotated[
        list[str] | None,
        typer.Option("--host-name", metavar="NAME", help="A name that a proxy calls this machine by, repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show runs live in a browser on this machine: all of them, one, or some side by side. Ctrl-C ends it."""
    from trainwright.pages.serve import serve as run_serve

    run_serve(folders or [Path("runs")], port, host_names or (), say_to(as_json))
