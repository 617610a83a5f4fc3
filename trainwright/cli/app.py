"""What all verbs share.

Each takes --json, and then prints one JSON object last on stdout; everything else goes to stderr.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, Protocol

import typer
from typer.core import TyperGroup

from trainwright.report.failure import describe
from trainwright.runs.printing import printable
from trainwright.runs.secrets import masked
from trainwright.version import __version__

if TYPE_CHECKING:
    from trainwright.monitoring.terminal import Console
    from trainwright.training.subject import Subject

P = ParamSpec("P")

ENDED = "the code that the recipe names ended the process: sys.exit({!r})"
KEEP_RUNNING = "put what only a script does, such as parse_args(), below `if __name__ == '__main__':`"


class VerbResult(Protocol):
    """What a verb ends with."""

    @property
    def exit_code(self) -> int: ...
    def to_json(self) -> Mapping[str, object]: ...


class PrintedResult(VerbResult, Protocol):
    """A result that is printed as lines of text without --json."""

    def lines(self) -> list[str]: ...


class Verbs(TyperGroup):
    """With --json, wrong usage is printed as an object too."""

    def invoke(self, ctx: Any) -> object:  # typer keeps the class of its context private
        try:
            return super().invoke(ctx)
        except Exception as error:
            if "--json" in sys.argv and hasattr(error, "format_message"):
                print(json.dumps({"error": error.format_message(), "exit": 2}))
            raise


app = typer.Typer(
    name="trainwright",
    cls=Verbs,
    help="Trains any PyTorch model so that a run never dies silently, is never lost, and explains itself.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RecipePath = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A YAML recipe, or the name of one in the box, such as gpt-tiny.")
]
RecipeOrRun = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE|RUN", help="A recipe, or a run folder: that is of its recipe, and its page shows the picture."
    ),
]
RecipeOrFunction = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE|MODULE:FUNCTION",
        help="A YAML recipe, the name of one in the box, or a function that returns (model, data, loss, optimizer).",
    ),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override a value of the recipe, repeatable.")
]
Accepted = Annotated[
    list[str] | None,
    typer.Option("--accept", metavar="PATH", help="Accept this difference though it changes the maths; or all."),
]
Allowed = Annotated[
    list[str] | None,
    typer.Option(
        "--allow", metavar="PACKAGE", help="Run only callables of these packages, repeatable; without it, of any."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object last, on stdout.")]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"trainwright {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


def seconds_of(text: str, option: str) -> float:
    """Seconds by the clock, as an option says them: ``90s``, ``2min``, or a bare number."""
    from trainwright.errors import UsageError
    from trainwright.recipe.duration import Duration

    try:
        duration = Duration.parse(text if text[-1:].isalpha() else f"{text}s", allow_zero=True)
    except UsageError:
        duration = None
    if duration is None or duration.unit != "s":
        raise UsageError(f"{option} {text} is no time by the clock", remedy="give for example 90s or 2min")
    return duration.value


@contextmanager
def importing_torch() -> Iterator[None]:
    """For the imports of a verb that trains: the garbage collector waits until they are done.

    What importing torch makes is never freed, and to look through it again and again takes 0.4 of 3.2 s. It is then
    left out of later collections, too. Does nothing once torch is imported: the process is not ours alone.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def verb(name: str | None = None, *, of: typer.Typer = app) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Registers a verb. Every error is printed with its remedy, and ends the process with the exit code of its kind."""

    def register(function: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                function(*args, **kwargs)
            except (typer.Exit, BrokenPipeError):
                raise
            except SystemExit as end:
                raise typer.Exit(_fail(f"{ENDED.format(end.code)}\n  remedy: {KEEP_RUNNING}", 1)) from None
            except (Exception, KeyboardInterrupt) as error:
                raise typer.Exit(_fail(*describe(error))) from None

        return of.command(name)(guarded)

    return register


def of_run(path: Path, picture: Path | None, name: str) -> tuple[Path, Path | None]:
    """The recipe to read, and where its picture goes: of a run folder its recipe, and the file ``name`` inside.

    Raises UsageError for a folder that holds no run, or a run without a recipe.
    """
    if not path.is_dir():
        return path, picture
    from trainwright.errors import StorageError, UsageError
    from trainwright.runs.folder import RunFolder

    run = RunFolder.open(path)
    if not run.recipe.is_file():
        raise UsageError(
            f"{path} has no recipe.yaml: a loop of your own", remedy="give a run of tw.fit or of trainwright train"
        )
    if picture is None and (run.path / name).is_symlink():
        raise StorageError(f"cannot write {run.path / name}: it is a symbolic link", remedy="remove that link")
    return run.recipe, picture or run.path / name


def subject_of(what: Path, settings: list[str] | None, environ: Mapping[str, str] | None = None) -> Subject:
    """What a verb works on: a recipe, that of a run of ``tw.fit``, or a function that returns the objects."""
    if ":" not in str(what) or what.exists():
        from trainwright.recipe import load

        load(what, overrides=settings or [], environ=environ)  # before torch is imported: what is wrong is said at once
    with importing_torch():
        from trainwright.training.subject import named
    return named(what, settings or [], environ)


def prints_aside(as_json: bool) -> AbstractContextManager[object]:
    """A context for the user's code: with --json, what models and datasets print goes to stderr."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def console_for(as_json: bool) -> Console:
    """The console for progress: with --json it is stderr, as stdout is for the object."""
    from trainwright.monitoring.terminal import Console

    return Console(stderr=as_json)


def say_to(as_json: bool) -> Callable[[str], None]:
    """A function that prints a line there, without markup."""
    console = console_for(as_json)
    return lambda line: console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def finish(result: VerbResult, as_json: bool) -> None:
    """Prints the result as JSON if asked to, and ends the process with its exit code."""
    if as_json:
        print(json.dumps(result.to_json()))
    raise typer.Exit(result.exit_code)


def answer(report: PrintedResult, as_json: bool) -> None:
    """Prints a report, and ends the process with its exit code."""
    if as_json:
        print(json.dumps(masked(report.to_json())))
    else:
        for line in report.lines():
            print(printable(masked(line)))
    raise typer.Exit(report.exit_code)


def _fail(text: str, code: int) -> int:
    text = masked(text)
    print(f"error: {printable(text)}", file=sys.stderr)
    if "--json" in sys.argv:
        print(json.dumps({"error": text, "exit": code}))
    return code
