"""``check RECIPE``: runs all checks in order, each part within its time budget."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from trainwright.assembly import assemble
from trainwright.assembly.assemble import Parts, build_dataset, build_loss, build_model, count_parameters
from trainwright.checkpoint.rng import seed_all
from trainwright.commands.check import data, learning, resources
from trainwright.commands.check.data import alignment, contradictions
from trainwright.commands.check.first_batch import (
    FirstBatch,
    first_batch,
    fits,
    gradients,
    initial_loss,
    right_loss,
)
from trainwright.commands.check.learning import BatchFit, RateEvidence, learning_rate
from trainwright.commands.check.samples import DatasetSample, read
from trainwright.commands.check.sandbox import Sandbox, untouched
from trainwright.commands.check.smoke import SMOKE_STEPS, SmokeRun, afterwards, diagnosed, smoke, trained
from trainwright.commands.check.verdict import CheckResult, Verdict, supervised
from trainwright.data.loading import Loading, StepBatches
from trainwright.distributed import choose_device
from trainwright.distributed.memory import free_bytes
from trainwright.engine.loss import measures_progress
from trainwright.engine.lr_range import LrRange
from trainwright.errors import DataError, MissingExtra, RecipeError, TrainwrightError, text_of
from trainwright.plan.batch import batch_of
from trainwright.plan.parallel import in_one_process
from trainwright.plan.trace.resolve import resolve
from trainwright.recipe import Loaded
from trainwright.training.custom_objects import require_loss
from trainwright.training.job import Job
from trainwright.training.prepare import prepare
from trainwright.training.problems import all_problems_reported
from trainwright.training.run import process_settings
from trainwright.training.supervision import audit_parts


@dataclass(frozen=True)
class Budget:
    """Seconds and counts for each part. A step that has begun is completed, so a slow step exceeds the seconds."""

    read_s: float = 3.0
    range_s: float = 10.0
    one_batch_s: float = 6.0
    smoke_s: float = 20.0
    most_samples: int = 4096
    smoke_steps: int = SMOKE_STEPS


class _CannotContinue(Exception):
    """Raised when nothing more can be checked."""


@dataclass
class _Progress:
    """A check in progress, with the results so far."""

    loaded: Loaded
    device: torch.device
    budget: Budget
    result: CheckResult
    objects: Parts | None = None
    train: DatasetSample = field(default_factory=lambda: DatasetSample(None))
    val: DatasetSample | None = None
    aligned: bool = False
    open_question: Verdict | None = None
    """A verdict that the samples alone leave open and the smoke run may decide."""
    seen: FirstBatch | None = None

    def add(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            self.result.add(verdict)

    @property
    def failed(self) -> bool:
        return bool(self.result.failed)


def check(
    loaded: Loaded,
    objects: Parts | None = None,
    *,
    budget: Budget = Budget(),
    say: Callable[[str], None] = lambda _text: None,
) -> CheckResult:
    """Check everything that can prevent a recipe from training. Leaves no file and no setting behind.

    The model is not compiled. ``objects`` replace those that the recipe names. They are trained, and must not be used
    afterwards. ``say`` receives each verdict as text at once.

    Raises RecipeError for a recipe that names something that cannot be built, UsageError for objects without a loss.
    """
    begin_s = time.perf_counter()
    require_loss(objects, "check")
    recipe = loaded.recipe
    plain = recipe.model.model_copy(update={"compile": False})
    quick = replace(loaded, recipe=recipe.model_copy(update={"model": plain}))
    result = CheckResult(loaded.source.name, say, complete=False)
    with process_settings(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        progress = _Progress(quick, choose_device(recipe.device), budget, result, objects)
        try:
            with all_problems_reported(quick, objects):
                result.complete = _check_all(progress)
        except _CannotContinue:
            pass
        except (RecipeError, MissingExtra):
            raise
        except TrainwrightError as error:
            result.add(Verdict("fail", "run", error.message, error.remedy))
        except Exception as error:  # from the user's model, loss or data in one of the short trainings
            result.add(Verdict("fail", "run", text_of(error, lines=1), "call the model and the loss by hand"))
        if progress.open_question and all(each.what != progress.open_question.what for each in result.verdicts):
            result.add(progress.open_question)
    result.seconds = time.perf_counter() - begin_s
    say(result.summary())
    return result


def _check_all(progress: _Progress) -> bool:
    """Run the checks. Returns True if all of them ran."""
    parts, predicted, available_bytes = _build(progress)
    if progress.failed:  # the first batch would exhaust the memory
        return False
    _check_data(progress, parts)
    _check_first_batch(progress, parts)
    if progress.seen is None or progress.seen.error or progress.seen.values_without == progress.seen.trained:
        return False
    try:
        job = prepare(in_one_process(progress.loaded), parts)
    except TrainwrightError:
        raise
    except Exception as error:
        raise TrainwrightError(text_of(error), remedy="run one batch by hand") from error
    progress.add([] if predicted else resources.memory(job, available_bytes))
    _check_training(progress, job)
    return True


def _build(progress: _Progress) -> tuple[Parts, list[Verdict], int]:
    """Return the live objects, the verdicts on their size, and the bytes available before they were built.

    The model is built only if its weights fit.
    """
    loaded, available_bytes = progress.loaded, free_bytes(progress.device)
    try:
        seed_all(loaded.recipe.seed)
        parts = progress.objects or _named_parts(progress, loaded, available_bytes)
        resolved = resolve(loaded, resources.device_of(progress.device), parts=parts)
        progress.loaded = resolved.loaded
        predicted = list(resources.predicted(resolved.loaded, parts, progress.device))
        parts = assemble.prepare(parts, resolved.loaded, progress.device, resolved.planned)
    except (_CannotContinue, TrainwrightError):
        raise
    except Exception as error:
        raise TrainwrightError(text_of(error), remedy="build the parts by hand, in Python") from error
    total, trainable = count_parameters(parts.model)
    message = f"{type(parts.model).__name__}, {total:,} parameters, {trainable:,} of them trained"
    progress.add([Verdict("ok", "model", message), *predicted])
    return parts, predicted, available_bytes


def _named_parts(progress: _Progress, loaded: Loaded, available_bytes: int) -> Parts:
    train = build_dataset(loaded, "train")
    val = build_dataset(loaded, "val") if loaded.recipe.data.val else None
    progress.add(resources.sized(loaded, train, available_bytes))
    if progress.failed:
        raise _CannotContinue
    model, notes = build_model(loaded, train)
    return Parts(model, train, {} if val is None else {"val": val}, build_loss(loaded), notes)


def _check_data(progress: _Progress, parts: Parts) -> None:
    """Check the samples before the model sees one."""
    budget, recipe = progress.budget, progress.loaded.recipe
    left_out = frozenset(recipe.data.quarantine)
    progress.train = read(parts.train, most=budget.most_samples, budget_s=budget.read_s, left_out=left_out)
    if parts.val is not None:
        progress.val = read(parts.val, most=budget.most_samples, budget_s=budget.read_s)
    train = progress.train
    progress.add(data.readable(train))
    if train.fatal or (progress.val and progress.val.fatal):
        progress.add(data.overlap(train, progress.val))
        raise _CannotContinue
    progress.add(data.finite(train))
    batch = batch_of(recipe.batch, None)
    has_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in parts.model.modules())
    progress.add(
        data.batch_fits(train, batch.size, batch.micro, drop_last=recipe.data.drop_last, has_batch_norm=has_norm)
    )
    audits = audit_parts(parts, left_out=left_out)
    progress.add(supervised(audits))
    if any(audit.refusal for audit in audits):
        raise _CannotContinue
    progress.add(data.repeated(train))
    progress.add(data.overlap(train, progress.val))
    progress.add(contradictions(train))
    found = alignment(train, progress.val)
    if found is not None:
        progress.aligned = found[1]
        if found[0].word == "cannot tell":
            progress.open_question = found[0]
        else:
            progress.add([found[0]])


def _check_first_batch(progress: _Progress, parts: Parts) -> None:
    """Check one batch with the untrained model."""
    recipe = progress.loaded.recipe
    batch = batch_of(recipe.batch, None)
    micro = min(batch.micro, progress.train.size or batch.micro)
    loading = Loading(
        micro,
        micro,
        seed=recipe.seed,
        shuffle=recipe.data.shuffle,
        device=progress.device,
        collate=parts.train.collate,
        quarantine=frozenset(recipe.data.quarantine),
        on_bad_sample=recipe.data.on_bad_sample,
    )
    try:
        step = next(iter(StepBatches(parts.train.dataset, loading)), None)
    except DataError as error:
        progress.add([Verdict("fail", "first batch", error.message, error.remedy)])
        return
    if step is None:
        progress.add([Verdict("fail", "first batch", "the training data gave no batch", "check that it is not empty")])
        return
    with untouched(parts.model, parts.loss):
        seed_all(recipe.seed)
        progress.seen = seen = first_batch(parts, step.micro[0])
    progress.add(data.scale(progress.train, normalised_inside=seen.begins_with_norm))
    progress.add(data.ids_fit(progress.train, seen.rows))
    progress.add(data.labels(progress.train, seen.classes, seen.ignored))
    for verdicts in (fits, initial_loss, gradients):
        progress.add(verdicts(seen))
    progress.add(right_loss(seen, progress.train))


def _check_training(progress: _Progress, job: Job) -> None:
    """Run the checks that train, the fastest first."""
    budget, sandbox, seen = progress.budget, Sandbox(job), progress.seen
    assert seen is not None
    torch.set_num_threads(job.plan.threads)
    sandbox.keep(budget.read_s)
    step_s = _step_s(job)
    computing_s = step_s - job.measured.reading.wait_s
    progress.add(resources.speed(sandbox, computing_s))
    if not measures_progress(job.parts.loss):
        run = smoke(sandbox, budget_s=budget.smoke_s, step_s=step_s, max_steps=budget.smoke_steps, guess=None)
        why = "the value of this loss does not measure progress"
        progress.add([Verdict("cannot tell", "learning rate", why, "follow the metrics of the run")])
        progress.add(diagnosed(run, progress.result))
        progress.add(afterwards(run))
        return
    found = learning.range_test(sandbox, budget_s=budget.range_s, step_s=computing_s)
    moved = learning.first_update(sandbox)
    fits = _learn_one_batch(progress, sandbox, found)
    run = smoke(sandbox, budget_s=budget.smoke_s, step_s=step_s, max_steps=budget.smoke_steps, guess=_guess(progress))
    lr = job.lr
    num_steps = job.plan.extent.steps or (job.plan.extent.seconds or 0.0) / step_s
    progress.add([learning_rate(RateEvidence(lr, num_steps, moved, found, fits, run))])
    chance = seen.loss_call.chance() if seen.loss_call else None
    inputs_vary = len({item.digest for item in progress.train.items[:64]}) > 1
    progress.add(learning.by_heart(fits, lr, inputs_vary=inputs_vary, chance=chance))
    progress.add(trained(run, lr))
    progress.add(_unrelated(progress, run, learning.best_of(fits)))
    progress.add(diagnosed(run, progress.result))
    progress.add(afterwards(run))
    memorized = any(fit.lr == lr and fit.fell >= learning.LEARNED_LOSS_FALL for fit in fits)
    progress.result.learns = memorized if run.learned is None else run.learned


def _step_s(job: Job) -> float:
    """Return the seconds of a step in the dry run, with the wait for its batch."""
    return max(job.plan.predicted.step_s or 0.0, 1e-4 + job.measured.reading.wait_s)


def _guess(progress: _Progress) -> float | None:
    """Return the loss of the best constant model, from the targets that were read.

    None for an unknown loss function, or one that adds other terms.
    """
    seen, train = progress.seen, progress.train
    call = seen.loss_call if seen is not None else None
    chance = call.chance() if call is not None else None
    if seen is None or call is None or chance is None:
        return None
    if abs(seen.loss - call.value()) > 0.05 * abs(call.value()):
        return None
    labels, numbers = train.labels(), train.numbers()
    if call.classes is not None and labels is not None:
        chance = min(chance, data.entropy(labels, call.ignored))
    elif call.op == "mse_loss" and numbers is not None:
        chance = min(chance, float(numbers.var(0).mean()))
    return chance if math.isfinite(chance) and chance > 0 else None


def _learn_one_batch(progress: _Progress, sandbox: Sandbox, found: LrRange | None) -> list[BatchFit]:
    """Overfit one batch at the most plausible learning rate, and at others if that fails."""
    tried: list[BatchFit] = []
    for lr in learning.plausible(found, sandbox.job.lr):
        tried.append(learning.learn_by_heart(sandbox, lr=lr, budget_s=progress.budget.one_batch_s))
        if tried[-1].fell >= learning.LEARNED_LOSS_FALL:
            break
    return tried


def _unrelated(progress: _Progress, run: SmokeRun, fit: BatchFit) -> Iterator[Verdict]:
    """Yield a verdict if a model overfits one batch but is no better than a guess on all data.

    The loss of a guess by class frequencies is their entropy.
    """
    labels = progress.train.labels()
    if labels is None or progress.aligned or progress.failed or progress.seen is None or progress.seen.classes is None:
        return
    if len(run.losses) < SMOKE_STEPS // 2 or run.epochs < 1 or fit.fell < learning.LEARNED_LOSS_FALL:
        return
    entropy = data.entropy(labels)
    best = min(run.ends[1], run.val_loss if run.val_loss is not None else math.inf)
    if best > 0.97 * entropy and len(labels) >= 64:
        yield Verdict(
            "warn",
            "alignment",
            f"similar samples and {run.epochs:.0f} epochs do not predict the labels: loss {best:.3g}, "
            f"by frequency alone {entropy:.3g}",
            "view ten samples: labels may be shuffled relative to the inputs",
            "data.label_feature_misaligned",
        )
