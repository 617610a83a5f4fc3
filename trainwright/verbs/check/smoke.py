"""The first hundred steps of the run itself, attended by the doctor, in a folder that is removed afterwards."""

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

from rich.console import Console

from trainwright.build.assemble import build_loading, validation_batches
from trainwright.engine.evaluate import evaluate
from trainwright.engine.loop import steps
from trainwright.engine.witness import SILENT
from trainwright.errors import TrainwrightError
from trainwright.observe.progress import Progress
from trainwright.runlog.folder import RunFolder
from trainwright.runlog.records import Found
from trainwright.state.checkpoint import load_checkpoint, save_checkpoint
from trainwright.state.cursor import StepBatch
from trainwright.state.train_state import TrainState
from trainwright.training.job import make_advance, until_of
from trainwright.training.run import attend
from trainwright.verbs.check.sandbox import Sandbox, within
from trainwright.verbs.check.verdict import Verdict

STEPS = 100
LOOKS = 40
"""Steps that the looks of the doctor at the first few take about as long as."""
ENOUGH = 20
"""Steps from which on a loss that does not fall says something."""
FELL = 0.02


@dataclass
class Smoke:
    """What the first steps gave. ``error`` is what ended them, with its remedy."""

    losses: list[float] = field(default_factory=list)
    skipped: int = 0
    seconds: float = 0.0
    attended: bool = False
    epochs: float = 0.0
    error: tuple[str, str] | None = None
    findings: list[Found] = field(default_factory=list)
    val_loss: float | None = None
    val_error: tuple[str, str] | None = None
    saved_bytes: int = 0
    save_error: tuple[str, str] | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """Loss at the beginning and at the end, each the median of a few steps."""
        few = max(1, len(self.losses) // 10)
        return statistics.median(self.losses[:few]), statistics.median(self.losses[-few:])


def smoke(bench: Sandbox, *, budget_s: float, step_s: float) -> Smoke:
    """Runs, evaluates and saves in a temporary folder. The doctor attends where there is time for that."""
    told, quiet = Smoke(), Progress(Console(file=io.StringIO()), quiet=True)
    begin_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="trainwright-check-") as place, bench.fresh() as state:
        job = replace(bench.job, state=state)
        told.attended = LOOKS * step_s < budget_s
        attending = attend(job, RunFolder.create(place, "smoke"), quiet.say) if told.attended else None
        advance = make_advance(job, witness=attending.witness if attending else SILENT)
        try:
            for result in steps(state, _some(bench, budget_s), advance, until=until_of(bench.job.plan)):
                told.losses.append(float(result.loss))
                told.skipped += bool(result.skipped)
                if attending:
                    attending.observe(result, state)
            if attending:
                attending.close()
        except Exception as error:  # of the user's code: a verdict, and the doctor looks at the step that raised
            told.error = _said(error)
            if attending:
                attending.close()
        told.findings = attending.findings() if attending else []
        told.seconds = time.perf_counter() - begin_s
        told.epochs = state.data.epoch + state.data.position / max(1, _length(bench))
        if told.error is None:
            _evaluate(bench, state, told, budget_s / 4)
            _save(state, Path(place), told)
    return told


def _some(bench: Sandbox, budget_s: float) -> Iterator[StepBatch]:
    """The batches that there is time for. The schedule runs as in the whole run."""
    return islice(within(bench.stream(), budget_s), STEPS)


def _length(bench: Sandbox) -> int:
    dataset = bench.job.parts.train.dataset
    return len(dataset) if hasattr(dataset, "__len__") else 2**62


def _said(error: Exception) -> tuple[str, str]:
    if isinstance(error, TrainwrightError):
        return error.message, error.remedy
    return f"{type(error).__name__}: {error}".splitlines()[0], "run the step by hand"


def _evaluate(bench: Sandbox, state: TrainState, told: Smoke, budget_s: float) -> None:
    job = bench.job
    loading = build_loading(job.parts, job.recipe, job.plan, job.device)
    batches = validation_batches(job.parts, job.recipe, loading)
    if batches is None:
        return
    end_s = time.perf_counter() + budget_s
    in_time = (micro for micro in islice(batches, 32) if time.perf_counter() < end_s)
    try:
        told.val_loss = evaluate(state.model, job.parts.loss, in_time, precision=job.precision).loss
    except Exception as error:
        told.val_error = _said(error)


def _save(state: TrainState, place: Path, told: Smoke) -> None:
    try:
        path, told.saved_bytes = save_checkpoint(state, place / "checkpoints")
        load_checkpoint(state, path)
    except Exception as error:
        told.save_error = _said(error)


def trained(told: Smoke) -> Iterator[Verdict]:
    """Whether the first steps go well."""
    count = len(told.losses)
    if told.error:
        yield Verdict("fail", "smoke run", f"step {count + 1} ended with {told.error[0]}", told.error[1])
        return
    if not count:
        yield Verdict("fail", "smoke run", "the training data gave no batch", "see whether batches can be filled")
        return
    first, last = told.ends
    said = f"{count} steps in {told.seconds:.0f} s, loss {first:.4g} -> {last:.4g}"
    finite = [loss for loss in told.losses if math.isfinite(loss)]
    if told.skipped or len(finite) < count:
        remedy = "see the lines below; look at learning rate, data and precision"
        said = f"{said}; {told.skipped} updates were not finite"
        yield Verdict("fail" if told.skipped > count // 4 or not finite else "warn", "smoke run", said, remedy)
    elif last > first + max(0.5 * abs(first), 1e-6) and count >= ENOUGH:
        remedy = "take a tenth of optimizer.lr; see the lines above for its range"
        yield Verdict("fail", "smoke run", f"{said}: it diverges", remedy, "opt.lr_too_high")
    elif count < ENOUGH or first - last > FELL * abs(first) or first - last > 2 * _noise(told.losses):
        yield Verdict("ok" if count >= 3 else "cannot tell", "smoke run", said)
    else:
        yield Verdict("cannot tell", "smoke run", f"{said}: it does not fall yet")


def _noise(losses: list[float]) -> float:
    """How far neighbouring steps usually differ."""
    return statistics.median(abs(a - b) for a, b in pairwise(losses)) if len(losses) > 1 else 0.0


def afterwards(told: Smoke) -> Iterator[Verdict]:
    """Evaluation and saving, tried once."""
    if told.val_error:
        yield Verdict("fail", "evaluation", told.val_error[0], told.val_error[1])
    elif told.val_loss is not None and not math.isfinite(told.val_loss):
        yield Verdict("fail", "evaluation", f"the validation loss is {told.val_loss}", "look for NaN in data.val")
    elif told.val_loss is not None:
        yield Verdict("ok", "evaluation", f"validation loss {told.val_loss:.4g} after these steps")
    if told.save_error:
        yield Verdict("fail", "checkpoint", told.save_error[0], told.save_error[1])
    elif told.saved_bytes:
        yield Verdict("ok", "checkpoint", f"{told.saved_bytes / 2**20:,.1f} MiB, saved and loaded again")


def diagnosed(told: Smoke, known: set[str]) -> Iterator[Verdict]:
    """What the doctor found in these steps, and no line above has said."""
    if not told.attended:
        yield Verdict("cannot tell", "doctor", "a step takes too long to look at it here; the run itself is attended")
    for found in told.findings:
        if found.severity == "info" or found.code in known:
            continue
        word = "fail" if found.severity == "critical" else "warn"
        said = f"{found.symptom}: {found.cause}"
        remedy = f"{found.remedy} (trainwright explain {found.code})"
        yield Verdict(word, f"step {found.step}", said, remedy, found.code)  # type: ignore[arg-type]
