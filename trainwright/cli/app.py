"""What all verbs share.

Each takes --json and then prints one JSON object last; what a person reads goes to stderr then.
"""

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from trainwright.errors import TrainwrightError

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")
INTERRUPTED = 130

app = typer.Typer(
    name="trainwright",
    help="Trains any PyTorch model so that a run never dies silently, is never lost, and explains itself.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML recipe.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override a value of the recipe, repeatable.")
]
Accepted = Annotated[
    list[str] | None,
    typer.Option("--accept", metavar="PATH", help="A difference that is wanted though it changes the maths, or all."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object last, on stdout.")]


def verb(name: str | None = None, *, of: typer.Typer = app) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Registers a verb; every error becomes a sentence with its remedy and the exit code of its kind."""

    def register(function: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                function(*args, **kwargs)
            except typer.Exit:
                raise
            except (Exception, KeyboardInterrupt) as error:
                raise typer.Exit(_fail(*told(error))) from None

        return of.command(name)(guarded)

    return register


def console_for(as_json: bool) -> Console:
    """Where progress goes: with --json, stdout belongs to the object."""
    from rich.console import Console

    return Console(stderr=as_json)


def say_to(as_json: bool) -> Callable[[str], None]:
    """Prints a line there as it is."""
    return functools.partial(console_for(as_json).print, markup=False, highlight=False, soft_wrap=True)


def finish(result: Any, as_json: bool) -> None:
    """Prints what a run ended with, and ends the process with its exit code."""
    if as_json:
        print(json.dumps(result.to_json()))
    raise typer.Exit(result.exit_code)


def answer(report: Any, as_json: bool) -> None:
    """Prints a diagnosis; exit 3 when it holds a critical finding."""
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        for line in report.lines():
            print(line)
    raise typer.Exit(report.exit_code)


def _fail(text: str, code: int) -> int:
    print(f"error: {text}", file=sys.stderr)
    if "--json" in sys.argv:
        print(json.dumps({"error": text, "exit": code}))
    return code


def told(error: Exception | KeyboardInterrupt) -> tuple[str, int]:
    """An error in a sentence with its remedy, and the exit code of its kind."""
    if isinstance(error, TrainwrightError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; what was committed before is intact", INTERRUPTED
    return _unforeseen(error), 1


def _unforeseen(error: Exception) -> str:
    """An error from the user's model, loss or data: what it says and the line it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    installed = str(Path(sys.prefix))
    files = [frame for frame in frames if not frame.filename.startswith(("<", installed))]
    ours = Path(__file__).parent.parent
    theirs = [frame for frame in files if ours not in Path(frame.filename).parents] or files
    at = f"\n  at {theirs[-1].filename}:{theirs[-1].lineno}: {theirs[-1].line}" if theirs else ""
    said = "\n  ".join([f"{type(error).__name__}: {error}{at}", *getattr(error, "__notes__", [])])
    return f"{said}\n  remedy: look at that line (error.txt of a run that began has it all)"
