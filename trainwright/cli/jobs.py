"""Commands that write job files for schedulers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.cli.app import Json, RecipePath, Settings, app, verb

if TYPE_CHECKING:
    from trainwright.commands.launch import JobFile
    from trainwright.commands.sweep import Sweep

launch_app = typer.Typer(help="Write a job file for a scheduler that trains a recipe on several machines, or a sweep.")
app.add_typer(launch_app, name="launch", no_args_is_help=True)

RecipeOrSweep = Annotated[
    Path, typer.Argument(metavar="RECIPE|SWEEP", help="A recipe, or a sweep file: one job per trial.")
]
AtOnce = Annotated[int | None, typer.Option("--at-once", min=1, help="Concurrent trials of a sweep. Default: all.")]
Ranks = Annotated[str, typer.Option("--ranks", metavar="MACHINESxRANKS", help="Machines, and ranks of each: 2x8.")]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Write it there instead of printing it.")]
Stack = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Start only on machines with this CUDA, driver and NCCL: cpu, cu126, cu130."),
]
Image = Annotated[str, typer.Option(help="The container image, with trainwright and the imports of the recipe.")]
Volume = Annotated[str, typer.Option(help="The PersistentVolumeClaim for the runs, which all pods can write.")]
Grace = Annotated[
    int, typer.Option(metavar="SECONDS", help="Time from the signal to the kill, for a step and a checkpoint.")
]


@verb("slurm", of=launch_app)
def launch_slurm(
    recipe: RecipeOrSweep,
    ranks: Ranks = "1x1",
    time: Annotated[str | None, typer.Option(help="Limit of the job: 04:00:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="The partition of the job.")] = None,
    account: Annotated[str | None, typer.Option(help="The account that is charged.")] = None,
    directives: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="KEY=VALUE", help="Any other option of sbatch, repeatable: qos=long."),
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Run in this container image (needs the Pyxis plugin), not in this Python.")
    ] = None,
    stack: Stack = None,
    at_once: AtOnce = None,
    grace: Grace = 120,
    output: Output = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Write an sbatch script that saves before its time limit and is then requeued."""
    from trainwright.commands.launch import Shape, slurm_job
    from trainwright.recipe import load

    named = {"time": time, "partition": partition, "account": account}
    pairs = [*(f"{key}={value}" for key, value in named.items() if value), *(directives or [])]
    if sweep := _sweep(recipe, ranks, settings, image=image, stack=stack):
        from trainwright.commands.launch import slurm_sweep

        words = [str(recipe.absolute()), *(word for each in settings or [] for word in ("--set", each))]
        job = slurm_sweep(sweep, words, at_once=at_once, grace_s=grace, directives=pairs)
        _print(job.written(output), as_json)
        return
    loaded = load(recipe, overrides=settings or [])
    job = slurm_job(
        loaded,
        Shape.parse(ranks),
        settings=settings or [],
        grace_s=grace,
        directives=pairs,
        image=image,
        stack=stack,
    )
    _print(job.written(output), as_json)


@verb("kubernetes", of=launch_app)
def launch_kubernetes(
    recipe: RecipeOrSweep,
    image: Image,
    volume: Volume,
    ranks: Ranks = "1x1",
    stack: Stack = None,
    at_once: AtOnce = None,
    grace: Grace = 120,
    output: Output = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Write a manifest: an indexed Job and a headless Service, which need no operator."""
    from trainwright.commands.launch import Shape, kubernetes_job
    from trainwright.recipe import load

    if sweep := _sweep(recipe, ranks, settings, stack=stack):
        from trainwright.commands.launch import kubernetes_sweep

        manifest = kubernetes_sweep(sweep, image=image, volume=volume, at_once=at_once, grace_s=grace)
        _print(manifest.written(output), as_json)
        return
    loaded, shape = load(recipe, overrides=settings or []), Shape.parse(ranks)
    job = kubernetes_job(loaded, shape, image=image, volume=volume, settings=settings or [], grace_s=grace, stack=stack)
    _print(job.written(output), as_json)


@verb("skypilot", of=launch_app)
def launch_skypilot(
    recipe: RecipePath,
    ranks: Ranks,
    image: Image,
    volume: Annotated[str, typer.Option(help="The volume of SkyPilot for the runs, which all machines can write.")],
    gpu: Annotated[str | None, typer.Option(help="The accelerator of each rank: H100; none for device: cpu.")] = None,
    stack: Stack = None,
    output: Output = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Write a task of SkyPilot, for machines of a cloud or a Kubernetes cluster."""
    from trainwright.commands.launch import Shape, skypilot_job
    from trainwright.recipe import load

    loaded, shape = load(recipe, overrides=settings or []), Shape.parse(ranks)
    job = skypilot_job(loaded, shape, image=image, volume=volume, gpu=gpu, settings=settings or [], stack=stack)
    _print(job.written(output), as_json)


def _sweep(path: Path, ranks: str, settings: list[str] | None, **refused: str | None) -> Sweep | None:
    """Return the sweep of a sweep file; None for a recipe. Raises UsageError for options that only recipes have."""
    from trainwright.commands.launch import Shape
    from trainwright.commands.sweep.spec import is_sweep_file, read_sweep
    from trainwright.errors import UsageError

    if not is_sweep_file(path):
        return None
    if Shape.parse(ranks) != Shape(1, 1):
        raise UsageError("a trial of a sweep has one rank", remedy="leave --ranks out")
    for option in (name for name, given in refused.items() if given):
        raise UsageError(f"--{option} is not for sweeps", remedy=f"leave --{option} out")
    return read_sweep(path, settings=settings or [], environ=os.environ)


def _print(job: JobFile, as_json: bool) -> None:
    """Print a job file including secrets of its command line, because it is piped into a scheduler."""
    print(json.dumps(job.to_json()) if as_json else "\n".join(job.lines()))
