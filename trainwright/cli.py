"""Thin verbs. Each takes --json and then prints one JSON object last; what a person reads goes to stderr then."""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from trainwright import __version__
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


verify_app = typer.Typer(help="Prove that checkpoints are whole, and that a resumed run is the same bits.")
app.add_typer(verify_app, name="verify", no_args_is_help=True)


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


def _console(as_json: bool) -> Console:
    """Where progress goes: with --json, stdout belongs to the object."""
    from rich.console import Console

    return Console(stderr=as_json)


def _say(as_json: bool) -> Callable[[str], None]:
    """Prints a line there as it is."""
    return functools.partial(_console(as_json).print, markup=False, highlight=False, soft_wrap=True)


def _finish(result: Any, as_json: bool) -> None:
    """Prints what a run ended with, and ends the process with its exit code."""
    if as_json:
        print(json.dumps(result.to_json()))
    raise typer.Exit(result.exit_code)


def _told(report: Any, as_json: bool) -> None:
    """Prints a diagnosis; exit 3 when it holds a critical finding."""
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        for line in report.lines():
            print(line)
    raise typer.Exit(report.exit_code)


@verb()
def demo(
    task: Annotated[str, typer.Option(help="text: a small GPT; digits: an image classifier.")] = "text",
    budget: Annotated[str, typer.Option(help="How long to train: 60s, 500steps, 2ep.")] = "60s",
    settings: Settings = None,
    broken: Annotated[
        str | None, typer.Option("--break", metavar="FAULT", help="Plant a fault for the doctor: lr, nan, labels, ...")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a small model on what ships with Python, offline; or break it and see the doctor name the fault."""
    if broken is not None:
        from trainwright.broken import show

        _told(show(broken, say=_say(as_json)), as_json)
        return
    from trainwright.demo import demo as run_demo

    _finish(run_demo(task, budget=budget, settings=settings or [], console=_console(as_json)), as_json)


@verb()
def train(recipe: RecipePath, settings: Settings = None, as_json: Json = False) -> None:
    """Train what a recipe asks for."""
    from trainwright.recipe import load

    loaded = load(recipe, overrides=settings or [])  # before torch: a wrong recipe is told at once
    from trainwright.run import train as run_train

    _finish(run_train(loaded, console=_console(as_json)), as_json)


@verb()
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    settings: Settings = None,
    accept: Accepted = None,
    as_json: Json = False,
) -> None:
    """Go on with a run from its newest checkpoint that verifies."""
    from trainwright.recipe import load
    from trainwright.runlog.folder import RunFolder

    folder = RunFolder.open(run)
    loaded = load(folder.recipe, overrides=settings or [], environ={})
    from trainwright.run import train as run_train

    _finish(run_train(loaded, resume=folder, accept=accept or [], console=_console(as_json)), as_json)


@verb()
def diagnose(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")], as_json: Json = False) -> None:
    """Say what is wrong with a run, dead or alive, from its records; exit 3 when something critical is."""
    from trainwright.report.diagnosis import diagnosis_of
    from trainwright.runlog.folder import RunFolder

    _told(diagnosis_of(RunFolder.open(run)), as_json)


@verb()
def replay(
    path: Annotated[Path, typer.Argument(metavar="BUNDLE|RUN", help="bundles/step-N, or a run of our own engine.")],
    step: Annotated[int | None, typer.Option(help="Which step; of a bundle, its own.")] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="FILE:FUNCTION", help="Builds the model of a watched loop: train.py:make"),
    ] = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Run a step again, bit for bit, and look closely at it; exit 1 when it does not come out the same."""
    from trainwright.rerun import rerun

    _told(rerun(path, step, model=model, settings=settings or [], say=_say(as_json)), as_json)


@verb()
def explain(
    code: Annotated[
        str, typer.Argument(metavar="CODE", help="A finding, such as opt.missing_zero_grad, or a group: opt.")
    ],
    as_json: Json = False,
) -> None:
    """Print the page of a finding: what it is, how to tell it from its look-alikes, remedies, sources."""
    from trainwright.doctor.pages import page

    text = page(code)
    print(json.dumps({"code": code, "page": text}) if as_json else text)


@verb()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    layout: Annotated[str, typer.Option("--format", help="safetensors, hf or state_dict.")] = "safetensors",
    which: Annotated[str, typer.Option(help="last, best, or the step of a checkpoint.")] = "last",
    average: Annotated[bool, typer.Option("--average", help="The moving average of the weights.")] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="The LoRA adapter alone, in PEFT's layout.")] = False,
    out: Annotated[Path | None, typer.Option(help="A new folder; in the run's own export/ otherwise.")] = None,
    as_json: Json = False,
) -> None:
    """Write the weights of a run for other programs."""
    from trainwright.export import export as write

    done = write(run, format=layout, which=which, average=average, adapter=adapter, out=out)
    for message in done.stepped_over:
        print(f"stepped over: {message}", file=sys.stderr)
    said = f"{done.path}\n  step {done.step:,}, {done.tensors} tensors, {done.bytes:,} bytes"
    print(json.dumps(done.to_json()) if as_json else said)


@verb("lr-range")
def lr_range(
    recipe: RecipePath,
    settings: Settings = None,
    steps: Annotated[int, typer.Option(min=10, help="Optimizer steps of the test.")] = 100,
    lowest: Annotated[float, typer.Option(help="Learning rate of the first step.")] = 1e-6,
    highest: Annotated[float, typer.Option(help="Learning rate of the last step.")] = 10.0,
    out: Annotated[Path, typer.Option(help="Where the picture is written.")] = Path("lr-range.svg"),
    as_json: Json = False,
) -> None:
    """Find a learning rate: grow it each step, watch the loss, draw the picture."""
    from trainwright.recipe import load

    loaded = load(recipe, overrides=settings or [])
    from trainwright.find_lr import find_lr

    answer = find_lr(loaded, steps=steps, lowest=lowest, highest=highest, out=out, console=_console(as_json))
    if as_json:
        print(json.dumps(answer))


@verb("checkpoint", of=verify_app)
def verify_checkpoint(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A checkpoint, or a run folder: each of its checkpoints.")
    ],
    as_json: Json = False,
) -> None:
    """Check every file, hash, tensor and value of checkpoints."""
    from trainwright.verify import verify_checkpoint as verify

    found, say = verify(path), _say(as_json)
    for each in found:
        say("\n".join(each.lines()))
    broken = any(each.problems for each in found)
    if as_json:
        print(json.dumps({"ok": not broken, "checkpoints": [each.to_json() for each in found]}))
    raise typer.Exit(1 if broken else 0)


@verb("resume", of=verify_app)
def verify_resume(
    recipe: RecipePath,
    steps: Annotated[int, typer.Option(min=1, help="Steps before the kill, and as many again after it.")] = 6,
    workers: Annotated[int, typer.Option(min=0, help="data.workers until the kill.")] = 2,
    then_workers: Annotated[int, typer.Option(min=0, help="data.workers of the resumed run.")] = 3,
    kill: Annotated[bool, typer.Option(help="End the first part by SIGKILL, or by an orderly stop.")] = True,
    keep: Annotated[bool, typer.Option(help="Keep the runs also when they are equal.")] = False,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Prove on a recipe that a killed and resumed run is the same bits as one that was not."""
    from trainwright.verify import Trial
    from trainwright.verify import verify_resume as verify

    say, trial = _say(as_json), Trial(recipe, steps, workers, then_workers, tuple(settings or ()), kill)
    proof = verify(trial, keep=keep, say=say)
    say("\n".join(proof.lines()))
    _finish(proof, as_json)


@verb()
def schema(as_json: Json = False) -> None:
    """Print the JSON Schema of recipes, for editors."""
    from trainwright.recipe import json_schema

    print(json.dumps(json_schema(), indent=None if as_json else 2))


@verb()
def env(as_json: Json = False) -> None:
    """Report and judge torch, CUDA, cuDNN, NCCL, the driver and the CPU."""
    from trainwright.report.environment import exit_status, gather, judge, render

    lines = judge(gather())
    if as_json:
        print(json.dumps({"lines": [vars(line) for line in lines], "exit": exit_status(lines)}))
    else:
        print(render(lines))
    raise typer.Exit(exit_status(lines))


@verb()
def version(as_json: Json = False) -> None:
    """Print the version."""
    print(json.dumps({"version": __version__}) if as_json else __version__)


def main() -> None:
    """The entry point. Interrupted twice, it does not wait for a checkpoint that a thread is writing."""
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise


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
    ours = Path(__file__).parent
    theirs = [frame for frame in files if ours not in Path(frame.filename).parents] or files
    at = f"\n  at {theirs[-1].filename}:{theirs[-1].lineno}: {theirs[-1].line}" if theirs else ""
    said = "\n  ".join([f"{type(error).__name__}: {error}{at}", *getattr(error, "__notes__", [])])
    return f"{said}\n  remedy: look at that line (error.txt of a run that began has it all)"


if __name__ == "__main__":
    main()
