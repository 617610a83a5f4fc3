"""Commands that write job files for schedulers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.cli.app import Json, RecipePath, Settings, app, verb

if TYPE_CHECKING:
    from trainwright.commands.launch import JobFile

launch_app = typer.Typer(help="Write a job file for a scheduler that trains a recipe on several machines.")
app.add_typer(launch_app, name="launch", no_args_is_help=True)

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
    recipe: RecipePath,
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
    _print(job.write_to(output), as_json)


@verb("kubernetes", of=launch_app)
def launch_kubernetes(
    recipe: RecipePath,
    image: Image,
    volume: Volume,
    ranks: Ranks = "1x1",
    stack: Stack = None,
    grace: Grace = 120,
    output: Output = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Write a manifest: an indexed Job and a headless Service, which need no operator."""
    from trainwright.commands.launch import Shape, kubernetes_job
    from trainwright.recipe import load

    loaded, shape = load(recipe, overrides=settings or []), Shape.parse(ranks)
    job = kubernetes_job(loaded, shape, image=image, volume=volume, settings=settings or [], grace_s=grace, stack=stack)
    _print(job.write_to(output), as_json)


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
    _print(job.write_to(output), as_json)


@verb("ray", of=launch_app)
def launch_ray(
    recipe: RecipePath,
    ranks: Ranks,
    folder: Annotated[str, typer.Option(help="The folder for the runs: an absolute path that all machines can write.")],
    output: Output = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Write a program that trains with Ray Train, on a Ray cluster that exists."""
    from trainwright.commands.launch import Shape, ray_job
    from trainwright.recipe import load

    loaded = load(recipe, overrides=settings or [])
    _print(ray_job(loaded, Shape.parse(ranks), folder=folder, settings=settings or []).write_to(output), as_json)


def _print(job: JobFile, as_json: bool) -> None:
    """Print a job file without masking secrets in its command line, because it is piped into a scheduler."""
    print(json.dumps(job.to_json()) if as_json else "\n".join(job.lines()))
