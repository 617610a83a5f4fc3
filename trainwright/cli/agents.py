"""Commands for coding agents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.app import Json, app, finish_printed, line_printer, seconds_of, verb

agent_app = typer.Typer(help="Instructions for coding agents.")
app.add_typer(agent_app, name="agent", no_args_is_help=True)


@verb()
def mcp(
    runs: Annotated[Path, typer.Argument(metavar="[RUNS]", help="The folder of the runs, or a run.")] = Path("runs"),
    code: Annotated[
        Path | None, typer.Option("--code", metavar="FOLDER", help="The folder of your code. Default: this one.")
    ] = None,
    allow_replay: Annotated[
        bool,
        typer.Option(
            "--allow-replay", help="Let agents replay steps and try remedies. This runs the code of the runs."
        ),
    ] = False,
    http: Annotated[
        bool, typer.Option("--http", help="Serve over HTTP on this machine, with a token; else stdio.")
    ] = False,
    port: Annotated[int | None, typer.Option(help="For --http. Default: 8787, or a free port.")] = None,
    time: Annotated[str, typer.Option("--time", help="Maximum time of a replay, plan or check.")] = "5min",
    memory: Annotated[str, typer.Option("--memory", help="Maximum memory of a replay, plan or check.")] = "8GiB",
    as_json: Json = False,
) -> None:
    """Serve diagnoses and evidence of runs, and replays if allowed, to coding agents over MCP."""
    from trainwright.recipe.formatting import parse_bytes

    try:
        from trainwright.agent.process import ProcessLimits
        from trainwright.agent.server import ServerOptions, serve_http, serve_stdio
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "mcp":
            raise
        from trainwright.errors import MissingExtra

        raise MissingExtra("mcp", needed_for="trainwright mcp") from None
    limits = ProcessLimits(seconds_of(time, "--time"), parse_bytes(memory))
    options = ServerOptions(runs, code or Path.cwd(), allow_replay, limits)
    if http:
        serve_http(options, port, line_printer(as_json))
    else:
        serve_stdio(options)


@verb("install", of=agent_app)
def agent_install(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="The root of your project. Default: here.")
    ] = Path(),
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an older or edited version of the texts.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write instructions for coding agents into a project: a skill, and a section of AGENTS.md."""
    from trainwright.agent.install import install

    finish_printed(install(folder, replace=replace), as_json)
