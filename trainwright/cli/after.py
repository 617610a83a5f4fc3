"""Commands for a run that exists."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.app import (
    Json,
    RecipeOrFunction,
    RecipePath,
    Settings,
    app,
    finish_printed,
    line_printer,
    subject_of,
    user_output_to_stderr,
    verb,
)
from trainwright.errors import UsageError
from trainwright.runs.printing import printable
from trainwright.version import __version__

ModelOf = Annotated[
    str | None,
    typer.Option(
        metavar="FILE:FUNCTION",
        help="A function that builds the model of a watched loop: train.py:make; or the arguments of a tw.fit run. "
        "Runs FILE: guard a loop in it with `if __name__ == '__main__'`.",
    ),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
DataOfRun = Annotated[str, typer.Argument(metavar="DATA", help="val, train, or package.module:callable.")]
Which = Annotated[str, typer.Option(help="last, best, or the step of a checkpoint. Default: best, if there is one.")]
ForwardBatch = Annotated[int | None, typer.Option(min=1, help="Samples per forward pass.")]
Averaged = Annotated[bool, typer.Option("--average", help="Use the average of the weights.")]
verify_app = typer.Typer(help="Prove that checkpoints are intact, and that runs have the expected bits.")
app.add_typer(verify_app, name="verify", no_args_is_help=True)


@verb()
def diagnose(
    run: RunFolder,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="First replay a step for the examinations that were left out. Runs code of the run."
        ),
    ] = False,
    model: ModelOf = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also the findings below a warning.")] = False,
    as_json: Json = False,
) -> None:
    """Diagnose a run, finished or not, from its records; exit 3 if a finding is critical."""
    from trainwright.report.diagnosis import diagnosis_of
    from trainwright.runs.folder import RunFolder

    folder = RunFolder.open(run)
    if deep:
        from trainwright.commands.deep import examine_later

        examine_later(folder, model=model, say=line_printer(as_json))
    elif model is not None:
        raise UsageError(
            "--model is for --deep, which replays a step", remedy=f"trainwright diagnose {run} --deep --model {model}"
        )
    finish_printed(replace(diagnosis_of(folder), verbose=verbose), as_json)


@verb()
def checks(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN|new", help="A run folder, or new; without it, what each check finds.")
    ] = None,
    code: Annotated[str | None, typer.Argument(metavar="CODE", help="After new: topic.name of the check.")] = None,
    as_json: Json = False,
) -> None:
    """List the checks; for a run, the result of each check; new CODE writes the files of a new check."""
    from trainwright.report.diagnosis import CheckList, diagnosis_of
    from trainwright.runs.folder import RunFolder

    if run == Path("new") and code is not None:
        from trainwright.commands.new_check import new_check

        finish_printed(new_check(code), as_json)
    else:
        finish_printed(CheckList(None if run is None else diagnosis_of(RunFolder.open(run)).checks), as_json)


@verb()
def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER|RUN", help="The folder of the runs, or a run.")] = Path(
        "runs"
    ),
    tagged: Annotated[list[str] | None, typer.Option(metavar="TAG", help="List the runs with this tag.")] = None,
    tag: Annotated[list[str] | None, typer.Option(metavar="TAG", help="Add a tag to the run.")] = None,
    untag: Annotated[list[str] | None, typer.Option(metavar="TAG", help="Remove a tag of the run.")] = None,
    note: Annotated[str | None, typer.Option(help="Replace the note on the run.")] = None,
    as_json: Json = False,
) -> None:
    """List the runs of a folder: start, state, verdict, newest step and losses. Or change the tags of a run."""
    from trainwright.report.marks import mark_run, marks_of
    from trainwright.report.runs import list_runs
    from trainwright.runs.folder import RunFolder

    if tag or untag or note is not None:
        run = RunFolder.open(folder).path
        tags = [each for each in [*marks_of(run).tags, *(tag or ())] if each not in (untag or ())]
        mark_run(run, tags=tags, note=note)
    finish_printed(list_runs(folder, tagged or ()), as_json)


@verb()
def replay(
    path: Annotated[Path, typer.Argument(metavar="BUNDLE|RUN", help="bundles/step-N, or a run of trainwright train.")],
    step: Annotated[int | None, typer.Option(help="The step; a bundle has one.")] = None,
    model: ModelOf = None,
    change: Annotated[
        str | None,
        typer.Option(
            "--try",
            metavar="CHANGE",
            help="Replay it with one change instead: lr=FACTOR, fp32, fp64, eval, train, without=ID,ID, clip=NORM, "
            "op=NAME (in float64), remedy=CODE.",
        ),
    ] = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Replay a step bit for bit, and examine it, or try a change on it; exit 1 if the replay differs."""
    from trainwright.commands.replay import rerun

    say = line_printer(as_json)
    finish_printed(rerun(path, step, model=model, settings=settings or [], say=say, change=change), as_json)


@verb()
def explain(
    code: Annotated[
        str,
        typer.Argument(
            metavar="CODE",
            help="A finding, such as optim.missing_zero_grad, a topic (optim), or words to search for.",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Print the page of a finding: description, similar findings, remedies, sources. Without a code, list all."""
    from trainwright.doctor.pages import page
    from trainwright.runs.language import language, translated

    text = page(code, None if as_json or language() == "en" else translated)
    print(json.dumps({"code": code, "page": text}) if as_json else text)


@verb()
def evidence(
    run: RunFolder,
    finding: Annotated[
        str | None, typer.Option("--finding", metavar="CODE", help="The finding. Default: the first one.")
    ] = None,
    code: Annotated[
        Path | None, typer.Option("--code", metavar="FOLDER", help="The folder of your code. Default: this one.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file. Default: evidence-CODE.md in the run folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the evidence for a finding as one Markdown file, for an issue or a language model. Masks secrets."""
    from trainwright.report.evidence import write_evidence
    from trainwright.runs.folder import RunFolder

    finish_printed(write_evidence(RunFolder.open(run), finding, code_root=code, out=out), as_json)


@verb()
def export(
    run: RunFolder,
    layout: Annotated[str | None, typer.Option("--format", help="safetensors (default), hf or state_dict.")] = None,
    which: Annotated[str, typer.Option(help="last, best, or the step of a checkpoint.")] = "last",
    average: Annotated[bool, typer.Option("--average", help="Export the average of the weights.")] = False,
    adapter: Annotated[
        bool,
        typer.Option("--adapter/--merge", help="Only the LoRA adapter, in PEFT's layout; or merged (default)."),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="A new folder. Default: in export/ of the run.")] = None,
    hf: Annotated[
        Path | None, typer.Option("--hf", metavar="FOLDER", help="Short for --format hf --out FOLDER.")
    ] = None,
    push: Annotated[
        str | None, typer.Option("--push", metavar="NAME", help="Upload it to the hub: user/model. Private if new.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the weights of a run for other programs."""
    from trainwright.commands.export import export as write
    from trainwright.commands.export import push as upload

    if hf is not None and (out is not None or layout not in (None, "hf")):
        raise UsageError("--hf is short for --format hf --out", remedy="remove --format and --out")
    layout = layout or ("hf" if hf is not None or (push is not None and not adapter) else "safetensors")
    if push is not None and layout != "hf" and not adapter:
        raise UsageError(
            f"--push uploads the layout of the hub, not --format {layout}", remedy="--hf FOLDER --push NAME"
        )
    done = write(run, format=layout, which=which, average=average, adapter=adapter, out=out or hf)
    for message in done.stepped_over:
        print(printable(f"checkpoint skipped: {message}"), file=sys.stderr)
    summary = f"{done.path}\n  step {done.step:,}, {done.tensors} tensors, {done.bytes:,} bytes"
    print(json.dumps(done.to_json()) if as_json else printable(summary))
    if push is not None:
        print(printable(f"uploaded: {upload(done.path, push)}"), file=sys.stderr)


@verb()
def evaluate(
    run: RunFolder,
    data: DataOfRun = "val",
    which: Which = "",
    batch: ForwardBatch = None,
    average: Averaged = False,
    as_json: Json = False,
) -> None:
    """Measure loss and metrics of a checkpoint of a run on a dataset."""
    from trainwright.commands.evaluate import evaluate_run

    finish_printed(evaluate_run(run, data, which=which, batch=batch, average=average), as_json)


@verb()
def predict(
    run: RunFolder,
    data: DataOfRun = "val",
    out: Annotated[
        Path | None, typer.Option(help="A new .npy or .pt file. Default: predictions.npy in the run.")
    ] = None,
    which: Which = "",
    batch: ForwardBatch = None,
    average: Averaged = False,
    as_json: Json = False,
) -> None:
    """Write the outputs of the model of a run for each sample of a dataset, in order."""
    from trainwright.commands.evaluate import predict_run

    finish_printed(predict_run(run, data, out=out, which=which, batch=batch, average=average), as_json)


@verb()
def errors(
    run: RunFolder,
    data: DataOfRun = "val",
    by: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN|MODULE:FUNCTION", help="Group the samples by this, repeatable."),
    ] = None,
    count: Annotated[
        int, typer.Option(min=1, max=75, help="Samples in each list; twice as many in that of labels.")
    ] = 20,
    folds: Annotated[
        int | None,
        typer.Option(
            min=2, help="Cross-validation: train the recipe this many times, each without a part of its data."
        ),
    ] = None,
    which: Which = "",
    batch: ForwardBatch = None,
    average: Averaged = False,
    as_json: Json = False,
) -> None:
    """Find where the model of a run is wrong: worst samples, confusions, slices, calibration, likely wrong labels."""
    from trainwright.commands.bad_cases.find import errors_in_folds, errors_of_run

    if folds is None:
        found = errors_of_run(run, data, by=by or (), count=count, which=which, batch=batch, average=average)
    elif data != "train" or which or average:
        raise UsageError(
            "--folds trains new models on the training set, so other DATA, --which and --average have no effect",
            remedy=f"trainwright errors {run} train --folds {folds}",
        )
    else:
        found = errors_in_folds(run, folds, by=by or (), count=count, batch=batch, say=line_printer(as_json))
    finish_printed(found, as_json)


@verb("checkpoint", of=verify_app)
def verify_checkpoint(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A checkpoint, or a run folder: each of its checkpoints.")
    ],
    as_json: Json = False,
) -> None:
    """Check every file, hash, tensor and value of checkpoints."""
    from trainwright.commands.verify.checkpoint import verify_checkpoint as verify

    found, say = verify(path), line_printer(as_json)
    for each in found:
        say("\n".join(each.lines()))
    broken = any(each.problems for each in found)
    if as_json:
        print(json.dumps({"ok": not broken, "checkpoints": [each.to_json() for each in found]}))
    raise typer.Exit(1 if broken else 0)


@verb("resume", of=verify_app)
def verify_resume(
    recipe: RecipeOrFunction,
    steps: Annotated[int, typer.Option(min=1, help="Steps before the kill, and as many after it.")] = 6,
    workers: Annotated[int, typer.Option(min=0, help="data.workers until the kill.")] = 2,
    then_workers: Annotated[int, typer.Option(min=0, help="data.workers of the resumed run.")] = 3,
    kill: Annotated[bool, typer.Option(help="End the first part by SIGKILL; otherwise by an orderly stop.")] = True,
    keep: Annotated[bool, typer.Option(help="Keep the runs even when they are equal.")] = False,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Prove on a recipe that a killed and resumed run has the same bits as an uninterrupted one."""
    subject = subject_of(recipe, settings)
    from trainwright.commands.verify.resume import ResumeTrial
    from trainwright.commands.verify.resume import verify_resume as verify

    trial = ResumeTrial(recipe, steps, workers, then_workers, tuple(settings or ()), kill)
    finish_printed(verify(trial, keep=keep, say=line_printer(as_json), build=subject.build), as_json)


@verb("plain", of=verify_app)
def verify_plain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|MODULE:FUNCTION",
            help="A recipe, or a function that returns (model, data, loss, optimizer) for tw.fit.",
        ),
    ],
    steps: Annotated[int, typer.Option(min=1, help="Steps that are compared.")] = 20,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Prove that the first steps have the same bits as the plain loop: zero_grad, forward, backward, step."""
    from trainwright.commands.verify.plain import verify_plain_of

    with user_output_to_stderr(as_json):
        proof = verify_plain_of(what, steps=steps, settings=settings or ())
    finish_printed(proof, as_json)


@verb("parallel", of=verify_app)
def verify_parallel(
    recipe: RecipePath,
    ranks: Annotated[int, typer.Option(help="Number of processes.")] = 2,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each run.")] = 5,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Prove on a recipe that its first steps on several ranks equal those of one process, and compare their speed."""
    from trainwright.commands.verify.parallel import verify_parallel as verify

    say = line_printer(as_json)
    finish_printed(verify(recipe, ranks=ranks, steps=steps, settings=settings or (), say=say), as_json)


@verb("packing", of=verify_app)
def verify_packing(recipe: RecipePath, settings: Settings = None, as_json: Json = False) -> None:
    """Prove on the first batch that packed samples do not see each other: logits and losses equal those alone."""
    from trainwright.commands.verify.packing import verify_packing as verify

    with user_output_to_stderr(as_json):
        proof = verify(recipe, settings=settings or ())
    finish_printed(proof, as_json)


@verb()
def version(as_json: Json = False) -> None:
    """Print the version."""
    print(json.dumps({"version": __version__}) if as_json else __version__)
