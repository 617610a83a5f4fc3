"""Commands that train."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from trainwright.cli.app import (
    Accepted,
    Allowed,
    Json,
    RecipePath,
    Settings,
    console_for,
    finish,
    finish_printed,
    importing_torch,
    line_printer,
    seconds_of,
    verb,
)
from trainwright.errors import UsageError

if TYPE_CHECKING:
    from trainwright.recipe import Loaded


MAX_NODES_WITH_FAST_KEEP_ALIVE = 16
"""With more nodes, torchrun's keep-alive interval stays at 5 s: each node writes the state of all to one store."""
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""Signals that torchrun passes on to the ranks. SIGUSR1 is not in its default."""


def become_torchrun(options: Sequence[str], loaded: Loaded) -> NoReturn:
    """Replace this process by torchrun with these ``options``, which runs the same command line on every rank.

    Raises RecipeError if the recipe does not suit the number of ranks, as far as ``options`` define it.
    """
    from trainwright.plan.parallel import solve_layout

    ranks = ranks_of(options)
    if ranks is not None:
        degrees = solve_layout(loaded.recipe, ranks)
        if degrees.divides_model:  # whether the model can be divided like this is known only from its code
            from trainwright.training.layout import require_layout

            require_layout(loaded, None, ranks)
    command = sys.argv[1 : sys.argv.index("--")]
    meet = [] if _sets_rendezvous(options) else ["--standalone"]
    passed_on = [] if _value(options, "signals-to-handle") else [f"--signals-to-handle={SIGNALS}"]
    torchrun = "from trainwright.cli.torchrun import main; main()"  # -m would warn: the package imports it as well
    arguments = ["-c", torchrun, *meet, *passed_on, *options, "-m", "trainwright", *command]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the default of torchrun, without its four lines of warning
    if not meet:
        arguments[-len(command) - 2 : -len(command) - 2] = _keep_alive(options)
        # With a shared store, the agent of a restarted node waits for an address that the others send only once.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.execv(sys.executable, [sys.executable, *arguments])


def _keep_alive(options: Sequence[str]) -> list[str]:
    """Return options with which torchrun replaces a node that is silent for 3 s (default 15 s). User options win."""
    nodes = (_value(options, "nnodes") or "1").rpartition(":")[2]
    is_small = nodes.isdecimal() and int(nodes) <= MAX_NODES_WITH_FAST_KEEP_ALIVE
    if not is_small or _value(options, "rdzv-backend") != "c10d":
        return []
    user_conf = _value(options, "rdzv-conf")
    return [f"--rdzv-conf=keep_alive_interval=1{f',{user_conf}' if user_conf else ''}"]


def ranks_of(options: Sequence[str]) -> int | None:
    """Return the number of processes that torchrun will start; None if the machines or torchrun decide it. Raises
    UsageError.
    """
    if not options[0].startswith("-"):
        remedy = "trainwright train RECIPE -- --nproc-per-node 4"
        raise UsageError(f"{options[0]!r} is not an option of torchrun", remedy=remedy)
    nodes, each = _value(options, "nnodes") or "1", _value(options, "nproc-per-node") or "1"
    return int(nodes) * int(each) if nodes.isdecimal() and each.isdecimal() else None


def _sets_rendezvous(options: Sequence[str]) -> bool:
    names = ("nnodes", "standalone", "rdzv-backend", "rdzv-endpoint", "master-addr", "master-port")
    flags = {option.partition("=")[0].lstrip("-").replace("_", "-") for option in options if option.startswith("-")}
    return not flags.isdisjoint(names)


def _value(options: Sequence[str], name: str) -> str | None:
    """Return the value of the last ``--name VALUE`` or ``--name=VALUE``. Underscores equal hyphens, as in torchrun."""
    found = None
    for option, following in zip(options, [*options[1:], ""], strict=True):
        key, equals, value = option.partition("=")
        if key.startswith("--") and key.lstrip("-").replace("_", "-") == name:
            found = value if equals else following
    return found


@verb()
def demo(
    task: Annotated[str, typer.Option(help="text: a small GPT; digits: an image classifier.")] = "text",
    budget: Annotated[
        str | None,
        typer.Option(
            help="Length: 60s from the first step (default), 500steps or 2ep. With --break 60steps by default."
        ),
    ] = None,
    settings: Settings = None,
    broken: Annotated[
        str | None,
        typer.Option(
            "--break",
            metavar="FAULT",
            help="Plant a fault: lr, nan, fp16, labels, zero-grad, sign, softmax, params, step; or none.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a small model offline, on data that ships with Python; or plant a fault for the doctor to find."""
    if broken is not None:
        from trainwright.commands.demo_faults import show

        finish_printed(show(broken, line_printer(as_json), budget=budget), as_json)
        return
    with importing_torch():
        from trainwright.commands.demo import demo as run_demo

    console = console_for(as_json)
    finish(run_demo(task, budget=budget or "60s", settings=settings or [], console=console), as_json)


Serve = Annotated[
    bool,
    typer.Option("--serve", help="Show the run in a browser while it trains. A separate process reads its files."),
]
Torchrun = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- OPTIONS OF TORCHRUN]", help="Train in several processes: -- --nproc-per-node 4"),
]


@verb()
def train(
    recipe: RecipePath,
    torchrun: Torchrun = None,
    settings: Settings = None,
    allowed: Allowed = None,
    serve: Serve = False,
    as_json: Json = False,
) -> None:
    """Train a recipe. A recipe is code: it runs the callables that it names.

    Exit 3 if a finding of the doctor is critical, 75 if it was stopped by a signal and is saved.
    """
    from trainwright.recipe import load
    from trainwright.recipe.resolve import require_allowed

    loaded = load(recipe, overrides=settings or [])  # before torch is imported: a wrong recipe is reported at once
    if allowed is not None:
        require_allowed(loaded, allowed)
    if torchrun:
        become_torchrun(torchrun, loaded)
    with importing_torch():
        from trainwright.training.run import train as run_train

    result = run_train(loaded, console=console_for(as_json), serve=serve)
    finish(result, as_json and result.is_first)


@verb()
def ladder(
    recipe: RecipePath,
    settings: Settings = None,
    steps: Annotated[
        int | None, typer.Option(min=16, help="Optimizer steps of the baseline. Default: the recipe's, at most 200.")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=16, help="Length of the baseline in samples.")] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="Start no rung after this time: 30min. Default: try all.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(metavar="RUNG", help="Leave this rung out, repeatable: fp16, compile, ...")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="FOLDER", help="The folder to write. Default: runs/<name>-ladder."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of each run. Default: OMP_NUM_THREADS, or all cores.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Go from a float32 baseline to a fast run, one change at a time: keep those that preserve the loss and pay.

    Exit 3 if a rung breaks; the best recipe below it is still written.
    """
    from trainwright.commands.ladder.climb import ladder as climb

    budget_s = math.inf if budget is None else seconds_of(budget, "--budget")
    found = climb(
        recipe,
        settings=settings or [],
        steps=steps,
        samples=samples,
        budget_s=budget_s,
        skip=skip or [],
        folder=folder,
        threads=threads,
        say=line_printer(as_json),
    )
    finish_printed(found, as_json)


@verb()
def resume(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run folder, or the URL of its copy (checkpoint.copy_to).")
    ],
    torchrun: Torchrun = None,
    settings: Settings = None,
    accept: Accepted = None,
    allowed: Allowed = None,
    serve: Serve = False,
    as_json: Json = False,
) -> None:
    """Continue a run from its newest intact checkpoint. It runs the callables that the run's recipe names."""
    from trainwright.recipe import load
    from trainwright.recipe.resolve import require_allowed
    from trainwright.runs.folder import RunFolder

    if "://" in run:
        with importing_torch():
            from trainwright.training.resume import folder_of
        folder = folder_of(run, line_printer(as_json))
    else:
        folder = RunFolder.open(run)
    loaded = load(folder.recipe, overrides=settings or [], environ={})
    if allowed is not None:
        require_allowed(loaded, allowed)
    if torchrun:
        become_torchrun(torchrun, loaded)
    with importing_torch():
        from trainwright.training.run import train as run_train
        from trainwright.training.subject import resumed_parts

    parts = resumed_parts(folder, loaded, allowed)
    result = run_train(
        loaded, parts=parts, resume=folder, accept=accept or [], console=console_for(as_json), serve=serve
    )
    finish(result, as_json and result.is_first)


@verb()
def sweep(
    what: Annotated[
        Path, typer.Argument(metavar="SWEEP|RECIPE|FOLDER", help="A sweep file, a recipe, or the folder of a sweep.")
    ],
    over: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH=VALUES", help="A varied path, repeatable: optimizer.lr=log:1e-4..1e-1, seed=0..4."),
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Number of trials. Default: a full grid, or 20.")] = None,
    sampler: Annotated[str | None, typer.Option(help="grid, random or tpe.")] = None,
    pruner: Annotated[str | None, typer.Option(help="none, median or hyperband.")] = None,
    metric: Annotated[str | None, typer.Option(help="loss (validation), train_loss, or a metric by name.")] = None,
    mode: Annotated[str | None, typer.Option(help="min or max; for a metric that is not a loss.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the sampler.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Concurrent trials. Default: as many as cores and memory allow.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of each trial, 1 by default.")] = None,
    budget: Annotated[str | None, typer.Option(help="20min, 24 (trials) or 5USD.")] = None,
    usd_per_hour: Annotated[float | None, typer.Option(help="Price of this machine, for a budget in USD.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the sweep and of its folder.")] = None,
    folder: Annotated[str | None, typer.Option(help="The parent of the sweep folder. Default: runs.")] = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Train a recipe with varied settings, several at once, and rank the results. The same command resumes a sweep."""
    from trainwright.commands.sweep import over_of, read_sweep, run_sweep

    found = read_sweep(
        what,
        over=over_of(over or []),
        settings=settings or [],
        environ=os.environ,
        trials=trials,
        sampler=sampler,
        pruner=pruner,
        metric=metric,
        mode=mode,
        seed=seed,
        jobs=jobs,
        threads=threads,
        budget=budget,
        usd_per_hour=usd_per_hour,
        name=name,
        folder=folder,
    )
    finish_printed(run_sweep(found, say=line_printer(as_json)), as_json)
