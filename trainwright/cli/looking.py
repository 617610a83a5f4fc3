"""The verbs that show runs: as a file, side by side, or live."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.app import (
    Json,
    Settings,
    answer,
    console_for,
    importing_torch,
    say_to,
    seconds_of,
    subject_of,
    verb,
)

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")]


@verb()
def report(
    runs: Runs,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to; else into the run folder.")] = None,
    as_json: Json = False,
) -> None:
    """Write a run, or several side by side, as one HTML file that needs nothing else and can be sent."""
    from trainwright.report.pages.report import write_report

    answer(write_report(runs, out), as_json)


@verb()
def compare(
    runs: Runs,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it as a page, with the curves, too.")] = None,
    as_json: Json = False,
) -> None:
    """Say what differs between runs: first what was asked, then what came of it, with the spread over seeds."""
    from trainwright.errors import UsageError
    from trainwright.report.pages.compare import RunComparison
    from trainwright.report.pages.report import write_report
    from trainwright.report.pages.view import RunView

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
    from trainwright.report.server.serve import serve as run_serve

    run_serve(folders or [Path("runs")], port, host_names or (), say_to(as_json))


@verb()
def profile(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE|RUN|MODULE:FUNCTION", help="A recipe, a run, or as of check.")
    ],
    seconds: Annotated[float, typer.Option(min=0.05, help="How long steps are timed at full speed.")] = 1.0,
    budget: Annotated[str, typer.Option(metavar="TIME", help="How long remedies are tried; 0s tries none.")] = "60s",
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Say what bounds a step, by operator, module and phase of some steps in a run of its own; try what may help."""
    from trainwright.runs.folder import RunFolder

    budget_s = seconds_of(budget, "--budget")
    is_run = (recipe / "recipe.yaml").is_file()
    path = RunFolder.open(recipe).recipe if is_run else recipe
    environ: dict[str, str] | None = {} if is_run else None
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its profiler warns of memory that is older than itself
    subject = subject_of(path, settings, environ)
    with importing_torch():
        from trainwright.commands.profile import profile as run_profile

    seen = run_profile(subject.build, for_s=seconds, budget_s=budget_s, console=console_for(as_json))
    answer(seen, as_json)
