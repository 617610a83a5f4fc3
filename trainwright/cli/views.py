"""Commands that show runs: as an HTML file, side by side, or live. Also ``profile``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.app import (
    Json,
    Settings,
    console_for,
    finish_printed,
    importing_torch,
    line_printer,
    seconds_of,
    subject_of,
    verb,
)

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")]


@verb()
def report(
    runs: Runs,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The file. Default: in the run folder, or here for several runs."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a run, or several side by side, as one self-contained HTML file."""
    from trainwright.report.pages.report import write_report

    finish_printed(write_report(runs, out), as_json)


@verb()
def compare(
    runs: Runs,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page with the curves.")] = None,
    as_json: Json = False,
) -> None:
    """Compare runs: first their settings, then their results, with the spread over seeds."""
    from trainwright.errors import UsageError
    from trainwright.report.pages.compare import RunComparison
    from trainwright.report.pages.report import write_report
    from trainwright.report.pages.view import RunView

    if len(runs) < 2:
        raise UsageError("compare needs two runs or more", remedy="trainwright compare runs/a runs/b")
    comparison = RunComparison.of([RunView.read(path) for path in runs])
    if html is not None:
        write_report(runs, html)
    finish_printed(comparison, as_json)


@verb()
def serve(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUNS...]", help="Folders of runs, or single runs. Default: runs.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Default: 8787, or a free port.")] = None,
    host_names: Annotated[
        list[str] | None,
        typer.Option("--host-name", metavar="NAME", help="A host name that a proxy uses for this machine, repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show runs live in a browser on this machine: all of them, one, or some side by side. Ctrl-C ends it."""
    from trainwright.report.server.serve import serve as run_serve

    run_serve(folders or [Path("runs")], port, host_names or (), line_printer(as_json))


@verb()
def profile(
    recipe: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE|RUN|MODULE:FUNCTION",
            help="A recipe, a run folder, or a function that returns (model, data, loss, optimizer).",
        ),
    ],
    seconds: Annotated[float, typer.Option(min=0.05, help="Seconds of timing at full speed.")] = 1.0,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Time for trying remedies; 0s tries none.")] = "60s",
    audit: Annotated[
        bool, typer.Option(help="Compare the dtypes and kernels that ran with those that the recipe requests.")
    ] = False,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Profile some steps by operator, module and phase in a separate run, find the bottleneck, and try remedies."""
    from trainwright.runs.folder import RunFolder

    budget_s = seconds_of(budget, "--budget")
    is_run = (recipe / "recipe.yaml").is_file()
    path = RunFolder.open(recipe).recipe if is_run else recipe
    environ: dict[str, str] | None = {} if is_run else None
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no profiler warnings about earlier allocations
    subject = subject_of(path, settings, environ)
    with importing_torch():
        from trainwright.commands.profile import profile as run_profile

    result = run_profile(subject.build, for_s=seconds, budget_s=budget_s, audits=audit, console=console_for(as_json))
    finish_printed(result, as_json)
