"""Functions that all commands share.

Every command accepts --json and then prints one JSON object last on stdout; everything else goes to stderr.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, Protocol

import typer
from typer.core import TyperGroup

from trainwright.report.failure import describe
from trainwright.runs.language import LANGUAGES, VARIABLE, language, translated
from trainwright.runs.printing import printable
from trainwright.runs.secrets import masked
from trainwright.version import __version__

if TYPE_CHECKING:
    from trainwright.monitoring.terminal import Console
    from trainwright.training.subject import Subject

P = ParamSpec("P")

ENDED = "the code that the recipe names ended the process: sys.exit({!r})"
KEEP_RUNNING = "move code that is only for scripts, such as parse_args(), below `if __name__ == '__main__':`"


class VerbResult(Protocol):
    """The result of a command."""

    @property
    def exit_code(self) -> int: ...
    def to_json(self) -> Mapping[str, object]: ...


class PrintedResult(VerbResult, Protocol):
    """A result that is printed as lines of text without --json."""

    def lines(self) -> list[str]: ...


class Verbs(TyperGroup):
    """The group of all commands. Accepts --lang before or after their names. --json also applies to usage errors."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        for index, option in enumerate(args[:end]):
            name, equals, value = option.partition("=")
            if name == "--lang" and (equals or index + 1 < end):
                os.environ[VARIABLE] = _language_of(value if equals else args[index + 1])  # ranks inherit it
                args = args[:index] + args[index + (1 if equals else 2) :]
                break
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.help = _translated_help(self.help)
        super().format_help(ctx, formatter)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command, with its help in the language of the output."""
        command = super().get_command(ctx, cmd_name)
        if command is not None and language() != "en":
            command.help = _translated_help(command.help)
            for each in command.params:
                vars(each)["help"] = _translated_help(vars(each).get("help"))
        return command

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
    Path, typer.Argument(metavar="RECIPE", help="A YAML recipe, or the name of a built-in one, such as gpt-tiny.")
]
RecipeOrRun = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE|RUN", help="A recipe, or a run folder: its recipe is used, and its page shows the picture."
    ),
]
RecipeOrFunction = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE|MODULE:FUNCTION",
        help="A YAML recipe, the name of a built-in one, or a function that returns (model, data, loss, optimizer).",
    ),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override a value of the recipe, repeatable.")
]
Accepted = Annotated[
    list[str] | None,
    typer.Option("--accept", metavar="PATH", help="Accept this difference although it changes the maths; or all."),
]
Allowed = Annotated[
    list[str] | None,
    typer.Option(
        "--allow", metavar="PACKAGE", help="Run only callables of these packages, repeatable. Default: of any package."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object last, on stdout.")]


def _translated_help(text: str | None) -> str | None:
    """Return a help text with each paragraph translated."""
    return text and "\n\n".join(translated(" ".join(each.split())) for each in text.split("\n\n"))


def _language_of(value: str) -> str:
    if value not in LANGUAGES:
        raise typer.BadParameter(f"--lang {value}: the languages are {', '.join(LANGUAGES)}")
    return value


def _print_version(is_set: bool) -> None:
    if is_set:
        print(f"trainwright {__version__}")
        raise typer.Exit


@app.callback()
def options(  # noqa: D103  typer would print its docstring as help
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    lang: Annotated[
        str | None, typer.Option(metavar="en|zh", help="Language of the output. Default: that of the locale.")
    ] = None,
) -> None: ...


def seconds_of(text: str, option: str) -> float:
    """Return the wall-clock seconds of an option: ``90s``, ``2min``, or a bare number."""
    from trainwright.errors import UsageError
    from trainwright.recipe.duration import Duration

    try:
        duration = Duration.parse(text if text[-1:].isalpha() else f"{text}s", allow_zero=True)
    except UsageError:
        duration = None
    if duration is None or duration.unit != "s":
        raise UsageError(f"{option} {text} is not a time", remedy="give for example 90s or 2min")
    return duration.value


@contextmanager
def importing_torch() -> Iterator[None]:
    """Suspend the garbage collector during the imports of a command that trains.

    Objects that importing torch creates are never freed, and repeated collections of them take 0.4 of 3.2 s. They are
    also excluded from later collections. Does nothing if torch is imported already, as in a user's own program.
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
    """Register a command. An error is printed with its remedy, and ends the process with its exit code."""

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


def recipe_of(path: Path) -> Path:
    """Return the recipe file in a run folder, or ``path`` if it is a file. Raises UsageError if the folder has none."""
    if not path.is_dir():
        return path
    from trainwright.errors import UsageError
    from trainwright.runs.folder import RunFolder

    run = RunFolder.open(path)
    if not run.recipe.is_file():
        raise UsageError(
            f"{path} has no recipe.yaml: it is the run of a custom loop",
            remedy="give a run of tw.fit or of trainwright train",
        )
    return run.recipe


def subject_of(what: Path, settings: list[str] | None, environ: Mapping[str, str] | None = None) -> Subject:
    """Return the subject of a command: a recipe, the recipe of a ``tw.fit`` run, or a function that makes objects."""
    if ":" not in str(what) or what.exists():
        from trainwright.recipe import load

        load(what, overrides=settings or [], environ=environ)  # before torch is imported, to report a mistake at once
    with importing_torch():
        from trainwright.training.subject import named
    return named(what, settings or [], environ)


def user_output_to_stderr(as_json: bool) -> AbstractContextManager[object]:
    """Return a context for user code. With --json, output of models and datasets goes to stderr."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def console_for(as_json: bool) -> Console:
    """Return the console for progress. With --json it is stderr, because stdout is for the object."""
    from trainwright.monitoring.terminal import Console

    return Console(stderr=as_json)


def line_printer(as_json: bool) -> Callable[[str], None]:
    """Return a function that prints a line without markup on the console for progress."""
    console = console_for(as_json)

    def say(line: str) -> None:
        console.print(printable(translated(line)), markup=False, emoji=False, highlight=False, soft_wrap=True)

    return say


def finish(result: VerbResult, as_json: bool) -> None:
    """Print the result as JSON if requested, and end the process with its exit code."""
    if as_json:
        print(json.dumps(result.to_json()))
    raise typer.Exit(result.exit_code)


def finish_printed(report: PrintedResult, as_json: bool) -> None:
    """Print a report as text or JSON, and end the process with its exit code."""
    if as_json:
        print(json.dumps(masked(report.to_json())))
    else:
        for line in report.lines():
            print(printable(translated(masked(line))))
    raise typer.Exit(report.exit_code)


def _fail(text: str, code: int) -> int:
    text = masked(text)
    print(printable(translated(f"error: {text}")), file=sys.stderr)
    if "--json" in sys.argv:
        print(json.dumps({"error": text, "exit": code}))
    return code
