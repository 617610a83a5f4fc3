"""Commands before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.app import (
    Json,
    RecipeOrFunction,
    RecipeOrRun,
    Settings,
    console_for,
    finish,
    finish_printed,
    line_printer,
    recipe_of,
    subject_of,
    user_output_to_stderr,
    verb,
)
from trainwright.errors import StorageError
from trainwright.runs.printing import printable


@verb()
def init(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND", help="classification, segmentation, language-model, table, finetune; rl, loop: no recipe."
        ),
    ],
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="A new folder. Default: the name of the kind.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="finetune: the folder or hub name of a pretrained model.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="finetune: conversations, completions, texts or preferences.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(metavar="FILE", help="finetune: the chat template, for a tokenizer without one.")
    ] = None,
    on_bad_record: Annotated[
        str, typer.Option(metavar="stop|skip", help="finetune: skip leaves out records that cannot be used.")
    ] = "stop",
    as_json: Json = False,
) -> None:
    """Create a small project that trains without changes: recipe, model, data, a test and a README."""
    from trainwright.commands.init import init as write

    made = write(
        kind,
        folder,
        model=model,
        data=data,
        chat_template=chat_template,
        on_bad_record=on_bad_record,  # type: ignore[arg-type]  # init checks it
    )
    finish_printed(made, as_json)


@verb()
def check(recipe: RecipeOrFunction, settings: Settings = None, as_json: Json = False) -> None:
    """Check if a recipe would train: one line for each verdict, with its remedy; exit 3 if it would not."""
    subject = subject_of(recipe, settings)
    from trainwright.commands.check.check import check as check_recipe

    with user_output_to_stderr(as_json):
        result = check_recipe(*subject.build(()), say=line_printer(as_json))
    finish(result, as_json)


@verb()
def plan(
    recipe: RecipeOrRun,
    device: Annotated[str | None, typer.Option(help="h100-80gb, rtx4090, cpu, ... Default: this machine.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of the device, if it differs: 24GiB.")] = None,
    devices: Annotated[Path | None, typer.Option(metavar="FILE", help="A table of more devices (YAML).")] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Number of such devices: memory, communication and time of each layout.")
    ] = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Predict memory and time of a step without the device, and choose the layout; exit 3 if it does not fit."""
    from trainwright.recipe import load

    recipe = recipe_of(recipe)
    if ranks is not None:
        from trainwright.commands.plan import plan_ranks
        from trainwright.training.problems import all_problems_reported

        loaded = load(recipe, overrides=settings or [])
        with user_output_to_stderr(as_json), all_problems_reported(loaded, ranks=ranks):
            many = plan_ranks(loaded, ranks, recipe=str(recipe), device=device, memory=memory, devices=devices)
        finish_printed(many, as_json)
    subject = subject_of(recipe, settings)
    from trainwright.commands.plan import show_plan

    with user_output_to_stderr(as_json):
        shown = show_plan(*subject.build(()), recipe=str(recipe), device=device, memory=memory, devices=devices)
    finish_printed(shown, as_json)


@verb()
def graph(
    recipe: RecipeOrRun,
    settings: Settings = None,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Levels of modules to show. Default: as many as fit on a screen.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw it into this file.")] = None,
    as_json: Json = False,
) -> None:
    """Show the modules of a model and the autograd graph of one step: parameters, FLOPs, memory kept for backward."""
    from trainwright.recipe import load

    if svg is None and recipe.is_dir():
        svg = recipe / "graph.svg"
        if svg.is_symlink():
            raise StorageError(f"cannot write {svg}: it is a symbolic link", remedy="remove that link")
    loaded = load(recipe_of(recipe), overrides=settings or [])
    from trainwright.commands.graph import draw_graph
    from trainwright.runs.storage import write_output
    from trainwright.training.problems import all_problems_reported

    say = line_printer(as_json)
    with user_output_to_stderr(as_json), all_problems_reported(loaded):
        drawn = draw_graph(loaded, depth=depth)
    say("\n".join(drawn.lines()))
    if svg is not None:
        write_output(svg, drawn.svg(), "--svg")
        say(f"picture: {svg}")
    if as_json:
        print(json.dumps(drawn.to_json()))


@verb("lr-range")
def lr_range(
    recipe: RecipeOrFunction,
    settings: Settings = None,
    steps: Annotated[int, typer.Option(min=10, help="Optimizer steps of the test.")] = 100,
    lowest: Annotated[float, typer.Option(help="Learning rate of the first step.")] = 1e-6,
    highest: Annotated[float, typer.Option(help="Learning rate of the last step.")] = 10.0,
    out: Annotated[Path, typer.Option(help="The file for the picture.")] = Path("lr-range.svg"),
    as_json: Json = False,
) -> None:
    """Find a learning rate: increase it in each step, and draw the loss."""
    built = subject_of(recipe, settings).build(())
    from trainwright.commands.lr_range import find_lr

    answer = find_lr(*built, steps=steps, lowest=lowest, highest=highest, out=out, console=console_for(as_json))
    if as_json:
        print(json.dumps(answer))


@verb("mup-check")
def mup_check(
    recipe: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE|MODULE:FUNCTION",
            help="A recipe, or a function of a width that returns (model, data, loss, optimizer).",
        ),
    ],
    more: Annotated[list[int] | None, typer.Argument(metavar="", hidden=True)] = None,
    settings: Settings = None,
    widths: Annotated[
        list[int] | None, typer.Option(metavar="N ...", help="Widths to train. Default: 64 128 256 512.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each width.")] = 4,
    key: Annotated[str, typer.Option(metavar="PATH", help="The recipe key of the width.")] = "model.args.d_model",
    out: Annotated[Path, typer.Option("--out", "-o", help="The file for the picture.")] = Path("mup-check.svg"),
    as_json: Json = False,
) -> None:
    """Check that a step changes each layer as much in a wide model as in a narrow one; exit 3 if not."""
    subject_of(recipe, settings)
    from trainwright.commands.mup_check import WIDTHS, build_by_width, check_widths, draw

    build = build_by_width(recipe, key, settings or [])
    with user_output_to_stderr(as_json):
        found = check_widths(build, [*(widths or ()), *(more or ())] or WIDTHS, steps=steps, say=line_printer(as_json))
    finish_printed(draw(found, out), as_json)


@verb("compare-optimizers")
def compare_optimizers(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe.")],
    optimizers: Annotated[
        list[str], typer.Argument(metavar="OPTIMIZER...", help="Short names, or package.module:callable.")
    ],
    settings: Settings = None,
    range_steps: Annotated[int, typer.Option(min=10, help="Optimizer steps of each range test.")] = 80,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each run.")] = 1,
    as_json: Json = False,
) -> None:
    """Train a recipe with several optimizers, each at the learning rate of a range test, and compare them."""
    from trainwright.commands.compare_optimizers import compare_optimizers as compared

    found = compared(
        recipe, optimizers, settings=settings or [], range_steps=range_steps, threads=threads, say=line_printer(as_json)
    )
    finish_printed(found, as_json)


@verb()
def schema(as_json: Json = False) -> None:
    """Print the JSON Schema of recipes, for editors."""
    from trainwright.recipe import json_schema

    print(json.dumps(json_schema(), indent=None if as_json else 2))


@verb()
def env(
    stack: Annotated[
        str | None, typer.Option(metavar="NAME", help="Expect this combination of CUDA, driver and NCCL: cpu, cu130.")
    ] = None,
    gpus: Annotated[int, typer.Option(min=0, help="Expect at least this many visible GPUs.")] = 0,
    as_json: Json = False,
) -> None:
    """Report and check torch, CUDA, cuDNN, NCCL, the driver and the CPU; exit 1 if they do not fit together."""
    from trainwright.errors import require_choice
    from trainwright.report.environment import STACKS, exit_status, gather, judge, render

    if stack is not None:
        require_choice("stack", stack, STACKS)
    lines = judge(gather(), stack=None if stack is None else STACKS[stack], gpus=gpus)
    if as_json:
        print(json.dumps({"lines": [vars(line) for line in lines], "exit": exit_status(lines)}))
    else:
        print(printable(render(lines)))
    raise typer.Exit(exit_status(lines))
