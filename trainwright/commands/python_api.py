"""The commands in Python, with the arguments of ``tw.fit``: ``tw.check(model, data, loss, optimizer=optimizer)``.

Each works on copies of the objects other than datasets. Random generators and settings of torch are restored.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar, Unpack

from torch import nn

from trainwright.checkpoint.rng import RngBag
from trainwright.commands.check.check import check as check_recipe
from trainwright.commands.check.verdict import CheckResult
from trainwright.commands.lr_range import run_lr_range
from trainwright.commands.mup_check import STEPS, WIDTHS, MupCheck, build_by_width, check_widths, draw
from trainwright.commands.plan import ShownPlan, show_plan
from trainwright.commands.profile import ProfiledRun
from trainwright.commands.profile import profile as profile_recipe
from trainwright.commands.replay import rerun
from trainwright.commands.replay.result import Rerun
from trainwright.commands.verify.resume import Proof, ResumeTrial, in_new_python, in_this_process
from trainwright.commands.verify.resume import verify_resume as verify_resume_of
from trainwright.engine.lr_range import LrRange
from trainwright.errors import UsageError
from trainwright.monitoring.terminal import Console
from trainwright.runs.folder import RunFolder
from trainwright.training.options import FitOptions, ModelLike, RunOptions
from trainwright.training.run import process_settings
from trainwright.training.subject import Built, parts_of_run, subject

LossLike = str | Callable[..., object] | None


class _HasLines(Protocol):
    def lines(self) -> list[str]: ...


L = TypeVar("L", bound=_HasLines)


def check(
    model: ModelLike,
    data: object = None,
    loss: LossLike = None,
    *,
    quiet: bool = False,
    **options: Unpack[FitOptions],
) -> CheckResult:
    """Check if ``tw.fit`` with these arguments would train, as ``trainwright check`` does for a recipe.

    Args:
        model: As in ``tw.fit``. Or without ``data``: the name of a recipe, a run folder's recipe.yaml, or
            ``module:function``.
        data, loss: As in ``tw.fit``.
        quiet: Print nothing.
        **options: The other arguments of ``tw.fit``.

    Returns:
        The verdicts in order; ``exit_code`` is 3 if it would not train.

    Example:
        >>> tw.check(model, loader, nn.CrossEntropyLoss(), lr=3e-4)
    """
    with process_settings():
        loaded, parts = subject(model, data, loss, options).build(())
        return check_recipe(loaded, parts, say=_say(quiet))


def plan(
    model: ModelLike,
    data: object = None,
    loss: LossLike = None,
    *,
    on: str | None = None,
    memory: str | None = None,
    quiet: bool = False,
    **options: Unpack[FitOptions],
) -> ShownPlan:
    """Predict memory and time of a step without the device, and choose the layout, as ``trainwright plan`` does.

    Args:
        model: As in ``tw.check``.
        data, loss: As in ``tw.fit``.
        on: The device to plan for, such as ``"h100-80gb"``. Default: the device of this machine.
        memory: Its memory, if it differs: ``"24GiB"``.
        quiet: Print nothing.
        **options: The other arguments of ``tw.fit``.

    Returns:
        The forecast; ``exit_code`` is 3 if the training does not fit as it stands.
    """
    with process_settings():
        loaded, parts = subject(model, data, loss, options).build(())
        return _printed(show_plan(loaded, parts, recipe="", device=on, memory=memory), quiet)


def profile(
    model: ModelLike,
    data: object = None,
    loss: LossLike = None,
    *,
    seconds: float = 1.0,
    budget_s: float = 60.0,
    quiet: bool = False,
    **options: Unpack[FitOptions],
) -> ProfiledRun:
    """Find what bounds a step, and try remedies, as ``trainwright profile`` does.

    Args:
        model: As in ``tw.check``.
        data, loss: As in ``tw.fit``.
        seconds: Seconds for which steps are timed at full speed.
        budget_s: Seconds for trying remedies; 0 tries none.
        quiet: Print nothing.
        **options: The other arguments of ``tw.fit``.

    Returns:
        The profile, and the run folder with its trace.
    """
    with process_settings():
        build = subject(model, data, loss, options).build
        console = Console(file=io.StringIO()) if quiet else Console()
        return _printed(profile_recipe(build, for_s=seconds, budget_s=budget_s, console=console), quiet)


def lr_range(
    model: ModelLike,
    data: object = None,
    loss: LossLike = None,
    *,
    steps: int = 100,
    lowest: float = 1e-6,
    highest: float = 10.0,
    **options: Unpack[RunOptions],
) -> LrRange:
    """Run the learning rate range test: increase the rate in each step (Smith 2017, arXiv:1506.01186).

    Args:
        model: As in ``tw.check``.
        data, loss: As in ``tw.fit``.
        steps: Optimizer steps of the test.
        lowest: Learning rate of the first step.
        highest: Learning rate of the last step.
        **options: The other arguments of ``tw.fit``.

    Returns:
        The rates and smoothed losses of each step; ``suggestion`` is None if the loss never fell.

    Example:
        >>> found = tw.lr_range(model, loader, nn.CrossEntropyLoss())
        >>> tw.fit(model, loader, nn.CrossEntropyLoss(), lr=found.suggestion)
    """
    with process_settings():
        loaded, parts = subject(model, data, loss, options).build(())
        return run_lr_range(loaded, parts, steps=steps, lowest=lowest, highest=highest)[0]


def mup_check(
    model: str | Callable[[int], nn.Module],
    data: object = None,
    loss: LossLike = None,
    *,
    widths: Sequence[int] = WIDTHS,
    steps: int = STEPS,
    key: str = "model.args.d_model",
    out: str | Path | None = None,
    quiet: bool = False,
    **options: Unpack[RunOptions],
) -> MupCheck:
    """Check that a step changes each layer as much in a wide model as in a narrow one (coordinate check).

    Yang et al. 2022, "Tensor Programs V", arXiv:2203.03466, appendix D.1.

    Args:
        model: A function of a width that returns the model. Or without ``data``: the name of a recipe, or
            ``module:function``, a function of a width that returns the arguments of ``tw.fit``.
        data, loss: As in ``tw.fit``.
        widths: Widths to train.
        steps: Optimizer steps of each, at the peak learning rate.
        key: The recipe key of the width.
        out: The file for the picture (SVG). Default: no picture.
        quiet: Print nothing.
        **options: The other arguments of ``tw.fit``. The optimizer must be a name, or a function that makes one.

    Returns:
        Sizes, slopes and a verdict for each layer; ``exit_code`` is 3 if one grows or vanishes with the width.

    Example:
        >>> tw.mup_check(lambda width: Net(width), loader, nn.CrossEntropyLoss(), lr=1e-3)
    """
    with process_settings():
        if isinstance(model, str):
            build = build_by_width(model, key, ())
        else:
            start = RngBag.capture()

            def build(width: int) -> Built:
                start.restore()
                more: RunOptions = {**options, "precision": "fp32"}
                return subject(model(width), data, loss, more).build(())

        found = check_widths(build, widths, steps=steps, say=_say(quiet))
        return _printed(draw(found, Path(out)) if out else found, quiet)


def replay(
    run: str | Path,
    step: int | None = None,
    model: ModelLike | None = None,
    data: object = None,
    loss: LossLike = None,
    *,
    quiet: bool = False,
    **options: Unpack[RunOptions],
) -> Rerun:
    """Replay one step of a run bit for bit and examine it, as ``trainwright replay`` does.

    Args:
        run: A run folder, or a bundle.
        step: The step to replay. For a bundle, the default is its step.
        model: The model before ``tw.fit`` trained it. Not needed for a run of a recipe or of a function,
            ``tw.fit("module:function")``. For a bundle: ``"file.py:function"``, which builds the model.
        data: The data of the run, in the form that was passed to ``tw.fit``.
        loss: The loss of the run.
        quiet: Print nothing.
        **options: The other objects of the run: ``optimizer``, ``schedule``, ``val``, ``advance``. All other arguments
            are in its recipe.

    Returns:
        The comparison and the findings; ``exit_code`` is 1 if the result differs.

    Example:
        >>> tw.replay("runs/run", 120, make_model(), loader, nn.CrossEntropyLoss())
    """
    folder = Path(run)
    with process_settings():
        if model is None or not (folder / "recipe.yaml").is_file():
            if not isinstance(model, str | None):
                raise UsageError(f"{run} has no recipe.yaml", remedy="for a bundle, pass model='file.py:function'")
            return _printed(rerun(folder, step, model=model, say=_say(quiet)), quiet)
        parts = parts_of_run(RunFolder.open(folder), model, data, loss, options)
        return _printed(rerun(folder, step, parts=parts, say=_say(quiet)), quiet)


def verify_resume(
    model: ModelLike,
    data: object = None,
    loss: LossLike = None,
    *,
    steps: int = 6,
    workers: int = 0,
    then_workers: int = 0,
    quiet: bool = False,
    **options: Unpack[RunOptions],
) -> Proof:
    """Prove that an interrupted and resumed run has the same bits as an uninterrupted one.

    Args:
        model: As in ``tw.check``. A recipe or ``module:function`` is trained in separate processes, one of which is
            killed. Objects are trained in this process, which stops and resumes with fresh copies.
        data, loss: As in ``tw.fit``.
        steps: Steps before the interruption, and as many after it.
        workers: Worker processes of the data before the interruption.
        then_workers: Worker processes of the resumed run.
        quiet: Print nothing.
        **options: The other arguments of ``tw.fit``.

    Returns:
        A proof; ``proof.equal`` is True if log and checkpoint have the same bits.
    """
    chosen = subject(model, data, loss, options)
    trial = ResumeTrial(Path(chosen.name or "tw.fit"), steps, workers, then_workers, kill=chosen.name is not None)
    run_part = in_new_python if chosen.name else in_this_process(chosen.build)
    with process_settings():
        return _printed(verify_resume_of(trial, say=_say(quiet), run_part=run_part, build=chosen.build), quiet)


def _say(quiet: bool) -> Callable[[str], None]:
    return (lambda _text: None) if quiet else print


def _printed(found: L, quiet: bool) -> L:
    if not quiet:
        print("\n".join(found.lines()))  # noqa: T201
    return found
