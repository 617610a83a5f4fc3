"""Runs up to a hundred steps of a recipe in a temporary folder, watched by the doctor if time allows."""

from __future__ import annotations

import io
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path

from trainwright.assembly.assemble import build_loading, validation_sets
from trainwright.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from trainwright.checkpoint.train_state import TrainState
from trainwright.commands.check.sandbox import Sandbox, within
from trainwright.commands.check.verdict import CheckResult, Verdict, Word
from trainwright.data.unwrap import length_of
from trainwright.engine.evaluate import evaluate
from trainwright.engine.loop import steps
from trainwright.engine.witness import SILENT
from trainwright.errors import TrainwrightError, text_of
from trainwright.monitoring.progress import Progress
from trainwright.monitoring.terminal import Console
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import Found
from trainwright.training.job import make_advance, until_of
from trainwright.training.open_run import make_engine_session

SMOKE_STEPS = 100
EXAMINATION_STEPS = 40
"""The doctor's first examinations take about as long as this number of steps."""
MIN_STEPS = 20
"""Number of steps after which a loss that does not fall is evidence."""
MIN_LOSS_FALL = 0.02
"""Relative fall of the loss that counts as falling."""
WHY_NOT_FINITE = "see the other lines; check learning rate, data and precision"
MAX_GUESS_RATIO = 1.05
"""Loss / loss of a guess above which a model is worse than a guess."""


@dataclass
class SmokeRun:
    """The results of the first steps.

    ``guess`` is the loss of a constant model; None if it is unknown. ``peak_lr`` is the highest learning rate of these
    steps. ``watched`` is True if the doctor watched. An error is its message and remedy. ``val_loss`` is None without a
    validation set.
    """

    guess: float | None = None
    peak_lr: float = 0.0
    losses: list[float] = field(default_factory=list)
    skipped: int = 0
    seconds: float = 0.0
    watched: bool = False
    epochs: float = 0.0
    error: tuple[str, str] | None = None
    findings: list[Found] = field(default_factory=list)
    val_loss: float | None = None
    val_error: tuple[str, str] | None = None
    saved_bytes: int = 0
    save_error: tuple[str, str] | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """The loss at the beginning and at the end, each a median of a few steps."""
        few = max(1, len(self.losses) // 10)
        return statistics.median(self.losses[:few]), statistics.median(self.losses[-few:])

    @property
    def falls(self) -> bool:
        """True if the loss fell by more than its noise."""
        first, last = self.ends
        return first - last > MIN_LOSS_FALL * abs(first) or first - last > 2 * _noise(self.losses)

    @property
    def diverges(self) -> bool:
        """True if the loss ended far above its first value, or not finite."""
        if len(self.losses) < MIN_STEPS:
            return False
        first, last = self.ends
        return not last <= first + max(0.5 * abs(first), 1e-6)

    @property
    def is_worse_than_a_guess(self) -> bool:
        """True if the loss ended clearly above the loss of a guess, and did not fall."""
        return (
            len(self.losses) >= MIN_STEPS
            and self.guess is not None
            and not self.ends[1] <= MAX_GUESS_RATIO * self.guess
            and not self.falls
        )

    @property
    def learned(self) -> bool | None:
        """True if the loss fell, and ended below the loss of a guess, also in validation; None for too few steps."""
        if self.error or self.val_error or not all(map(math.isfinite, self.losses)):
            return False
        if len(self.losses) < MIN_STEPS:
            return None
        seen = [self.ends[1], *([] if self.val_loss is None else [self.val_loss])]
        return self.falls and all(loss < (math.inf if self.guess is None else self.guess) for loss in seen)


def smoke(sandbox: Sandbox, *, budget_s: float, step_s: float, max_steps: int, guess: float | None) -> SmokeRun:
    """Train, evaluate and save in a temporary folder. The doctor watches if there is time for that."""
    run, quiet = SmokeRun(guess), Progress(Console(file=io.StringIO()), quiet=True)
    begin_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="trainwright-check-") as place, sandbox.built() as live:
        job, state = replace(sandbox.job, built=live), live.state
        run.watched = EXAMINATION_STEPS * step_s < budget_s
        observer = make_engine_session(job, RunFolder.create(place, "smoke"), quiet.say) if run.watched else None
        advance = make_advance(job, witness=observer.witness if observer else SILENT)
        advance = observer.around(advance) if observer else advance
        batches = islice(within(sandbox.stream(), budget_s), max_steps)
        try:
            for result in steps(state, batches, advance, until=until_of(job.plan)):
                run.losses.append(float(result.loss))
                run.peak_lr = max(run.peak_lr, result.lr)
                run.skipped += bool(result.skipped)
                if observer:
                    observer.observe(result, state)
            if observer:
                observer.close()
        except Exception as error:
            # An error of user code becomes a verdict. The doctor examines the step that raised it.
            run.error = _message_and_remedy(error)
            if observer:
                observer.close()
        run.findings = observer.findings() if observer else []
        run.seconds = time.perf_counter() - begin_s
        num_samples = length_of(job.parts.train.dataset) or 2**62
        run.epochs = state.data.epoch + state.data.position / num_samples
        if run.error is None:
            _evaluate(sandbox, state, run, budget_s / 4)
            _save(state, Path(place), run)
    return run


def _message_and_remedy(error: Exception) -> tuple[str, str]:
    if isinstance(error, TrainwrightError):
        return error.message, error.remedy
    return text_of(error, lines=1), "run the step by hand"


def _evaluate(sandbox: Sandbox, state: TrainState, run: SmokeRun, budget_s: float) -> None:
    job = sandbox.job
    loading = build_loading(job.parts, job.recipe, job.plan, job.device)
    batches = next(iter(validation_sets(job.parts, job.recipe.evaluation, loading).values()), None)
    if batches is None:
        return
    in_time = within(iter(islice(batches, 32)), budget_s)
    try:
        run.val_loss = evaluate(state.model, job.parts.loss, in_time, precision=job.precision).loss
    except Exception as error:
        run.val_error = _message_and_remedy(error)


def _save(state: TrainState, place: Path, run: SmokeRun) -> None:
    try:
        path, run.saved_bytes = save_checkpoint(state, place / "checkpoints")
        load_checkpoint(state, path)
    except Exception as error:
        run.save_error = _message_and_remedy(error)


def trained(run: SmokeRun, lr: float) -> Iterator[Verdict]:
    """Yield the verdict on the first steps. ``lr`` is the peak learning rate of the recipe."""
    count = len(run.losses)
    if run.error:
        yield Verdict("fail", "smoke run", f"step {count + 1} ended with {run.error[0]}", run.error[1])
        return
    if not count:
        yield Verdict("fail", "smoke run", "the training data gave no batch", "check that the dataset fills a batch")
        return
    first, last = run.ends
    message = f"{count} steps in {run.seconds:.0f} s, loss {first:.4g} -> {last:.4g}"
    if run.peak_lr < 0.5 * lr:
        message += f" at lr up to {run.peak_lr:.2g} of {lr:.2g}"
    infinite = sum(not math.isfinite(loss) for loss in run.losses)
    if run.skipped > count // 4 or not math.isfinite(last):
        yield Verdict("fail", "smoke run", f"{message}; {_not_finite(run.skipped, infinite)}", WHY_NOT_FINITE)
    elif run.diverges:
        yield Verdict(
            "fail", "smoke run", f"{message}: it diverges", "take a tenth of optimizer.lr", "optim.lr_too_high"
        )
    elif run.skipped or infinite:
        yield Verdict("warn", "smoke run", f"{message}; {_not_finite(run.skipped, infinite)}", WHY_NOT_FINITE)
    elif count < MIN_STEPS:
        yield Verdict("ok" if count >= 3 else "cannot tell", "smoke run", message)
    elif not run.falls:
        yield Verdict("cannot tell", "smoke run", f"{message}: it does not fall yet")
    elif run.guess is not None and last >= run.guess:
        yield Verdict("cannot tell", "smoke run", f"{message}: no better than a guess ({run.guess:.4g}) yet")
    else:
        yield Verdict("ok", "smoke run", message)


def _not_finite(skipped: int, losses: int) -> str:
    return f"not finite: {skipped} updates, which were skipped, and {losses} losses"


def _noise(losses: list[float]) -> float:
    """Return the median absolute difference between the losses of consecutive steps."""
    return statistics.median(abs(a - b) for a, b in pairwise(losses)) if len(losses) > 1 else 0.0


def afterwards(run: SmokeRun) -> Iterator[Verdict]:
    """Yield the verdicts on one evaluation and one save."""
    if run.val_error:
        yield Verdict("fail", "evaluation", run.val_error[0], run.val_error[1])
    elif run.val_loss is not None and not math.isfinite(run.val_loss):
        yield Verdict("fail", "evaluation", f"the validation loss is {run.val_loss}", "check data.val for NaN")
    elif run.val_loss is not None and run.guess is not None and run.val_loss >= run.guess and run.ends[1] < run.guess:
        message = (
            f"validation loss {run.val_loss:.4g}, no better than a guess ({run.guess:.4g}); the training loss is better"
        )
        yield Verdict("cannot tell", "evaluation", message)
    elif run.val_loss is not None:
        yield Verdict("ok", "evaluation", f"validation loss {run.val_loss:.4g} after these steps")
    if run.save_error:
        yield Verdict("fail", "checkpoint", run.save_error[0], run.save_error[1])
    elif run.saved_bytes:
        yield Verdict("ok", "checkpoint", f"{run.saved_bytes / 2**20:,.1f} MiB, saved and loaded again")


def diagnosed(run: SmokeRun, known: CheckResult) -> Iterator[Verdict]:
    """Yield the doctor's findings in these steps, except those that ``known`` has with at least the same severity."""
    if not run.watched:
        yield Verdict(
            "cannot tell", "doctor", "a step takes too long to be watched in the check; the run itself is watched"
        )
    for found in run.findings:
        word: Word = "fail" if found.severity == "critical" else "warn"
        if found.severity == "info" or known.has(found.code, word):
            continue
        message = f"{found.symptom}: {found.cause}"
        remedy = f"{found.remedy} (trainwright explain {found.code})"
        yield Verdict(word, f"step {found.step}", message, remedy, found.code)
