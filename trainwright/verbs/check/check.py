"""``check RECIPE``: every verdict in its order, each part within its time. Composition."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from trainwright.build import assemble
from trainwright.build.assemble import Parts, build_dataset, build_loss, build_model
from trainwright.build.data import Loading, StepBatches
from trainwright.build.model import count_parameters
from trainwright.engine.lr_range import LrRange
from trainwright.errors import DataError, MissingExtra, RecipeError, TrainwrightError
from trainwright.forecast.resolve import resolve
from trainwright.plan.batch import solve_batch
from trainwright.plan.machine import read_machine
from trainwright.recipe import Loaded
from trainwright.state.rng import preserved_rng, seed_all
from trainwright.training.job import Job, prepare
from trainwright.training.run import process_settings
from trainwright.verbs.check import data, learning, resources
from trainwright.verbs.check.alignment import alignment, contradictions
from trainwright.verbs.check.first_batch import (
    First,
    first_batch,
    fits,
    gradients,
    ignored_by,
    initial_loss,
    right_loss,
)
from trainwright.verbs.check.learning import Heart
from trainwright.verbs.check.resources import memory_at_hand
from trainwright.verbs.check.samples import DatasetSample, read
from trainwright.verbs.check.sandbox import Sandbox, untouched
from trainwright.verbs.check.smoke import STEPS, Smoke, afterwards, diagnosed, smoke, trained
from trainwright.verbs.check.verdict import Checkup, Verdict
from trainwright.world import choose_device


@dataclass(frozen=True)
class Budget:
    """Seconds for each part. What is begun is ended, so a slow step adds to it."""

    read_s: float = 3.0
    range_s: float = 6.0
    heart_s: float = 6.0
    smoke_s: float = 20.0
    most_samples: int = 4096


class _Over(Exception):
    """Nothing more can be looked at."""


@dataclass
class _Look:
    """A check under way: what is known of the recipe by now."""

    loaded: Loaded
    device: torch.device
    budget: Budget
    checkup: Checkup
    train: DatasetSample = field(default_factory=lambda: DatasetSample(None))
    val: DatasetSample | None = None
    aligned: bool = False
    open_question: Verdict | None = None
    """What the samples alone do not tell, and the smoke run may."""
    seen: First | None = None

    def tell(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            self.checkup.add(verdict)

    @property
    def failed(self) -> bool:
        return self.checkup.exit_code != 0


def check(loaded: Loaded, *, budget: Budget = Budget(), tell: Callable[[str], None] = lambda text: None) -> Checkup:
    """Looks at everything that can keep a recipe from training, and says it. Leaves no file and no setting behind.

    The model is not compiled here. Raises RecipeError for a recipe that names what cannot be built.
    """
    begin_s = time.perf_counter()
    recipe = loaded.recipe
    plain = recipe.model.model_copy(update={"compile": False})
    quick = replace(loaded, recipe=recipe.model_copy(update={"model": plain}))
    checkup = Checkup(loaded.source.name, tell)
    with process_settings(), preserved_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        look = _Look(quick, choose_device(recipe.device), budget, checkup)
        try:
            checkup.complete = _look_at(look)
        except _Over:
            checkup.complete = False
        except (RecipeError, MissingExtra):
            raise
        except TrainwrightError as error:
            checkup.complete = False
            checkup.add(Verdict("fail", "run", error.message, error.remedy))
        if look.open_question and all(each.what != look.open_question.what for each in checkup.verdicts):
            checkup.add(look.open_question)
    checkup.seconds = time.perf_counter() - begin_s
    tell(checkup.summary())
    return checkup


def _look_at(look: _Look) -> bool:
    """Whether all of it was looked at."""
    parts, at_hand = _built(look)
    foreseen = list(resources.foreseen(look.loaded, parts, look.device))
    look.tell(foreseen)
    if look.failed:  # the first batch would take it all
        return False
    _data(look, parts)
    _first(look, parts)
    if look.seen is None or look.seen.error or look.seen.values_without == look.seen.trained:
        return False
    try:
        job = prepare(look.loaded, parts)
    except TrainwrightError:
        raise
    except Exception as error:
        raise TrainwrightError(f"{type(error).__name__}: {error}", remedy="run one batch by hand") from error
    look.tell([] if foreseen else resources.memory(job, at_hand))
    _trained(look, job)
    return True


def _built(look: _Look) -> tuple[Parts, int]:
    """The live objects. First the datasets, then what the model weighs, then the model."""
    loaded, at_hand = look.loaded, memory_at_hand(look.device, read_machine())
    try:
        seed_all(loaded.recipe.seed)
        train = build_dataset(loaded, "train")
        val = build_dataset(loaded, "val") if loaded.recipe.data.val else None
        look.tell(resources.sized(loaded, train, at_hand))
        if look.failed:
            raise _Over
        model, notes = build_model(loaded, train)
        parts = Parts(model, train, val, build_loss(loaded), notes)
        settled = resolve(loaded, resources.device_of(look.device), parts=parts)
        look.loaded = settled.loaded
        parts = assemble.prepare(parts, settled.loaded, look.device, settled.planned)
    except (_Over, TrainwrightError):
        raise
    except Exception as error:
        raise TrainwrightError(f"{type(error).__name__}: {error}", remedy="make it by hand, in Python") from error
    total, trainable = count_parameters(parts.model)
    said = f"{type(parts.model).__name__}, {total:,} parameters, {trainable:,} of them trained"
    look.tell([Verdict("ok", "model", said)])
    return parts, at_hand


def _data(look: _Look, parts: Parts) -> None:
    """What can be said before the model sees a sample."""
    budget, recipe = look.budget, look.loaded.recipe
    look.train = read(parts.train, most=budget.most_samples, budget_s=budget.read_s)
    if parts.val is not None:
        look.val = read(parts.val, most=budget.most_samples, budget_s=budget.read_s)
    train = look.train
    look.tell(data.readable(train))
    look.tell(data.finite(train))
    batch = solve_batch(recipe.batch.size, recipe.batch.micro, recipe.batch.accumulation)
    has_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in parts.model.modules())
    look.tell(data.batch_fits(train, batch.size, batch.micro, drop_last=recipe.data.drop_last, has_batch_norm=has_norm))
    look.tell(data.repeated(train))
    look.tell(data.overlap(train, look.val))
    look.tell(contradictions(train))
    found = alignment(train, look.val)
    if found is not None:
        look.aligned = found[1]
        if found[0].word == "cannot tell":
            look.open_question = found[0]
        else:
            look.checkup.add(found[0])


def _first(look: _Look, parts: Parts) -> None:
    """One batch through the untrained model."""
    recipe = look.loaded.recipe
    batch = solve_batch(recipe.batch.size, recipe.batch.micro, recipe.batch.accumulation)
    micro = min(batch.micro, look.train.size or batch.micro)
    how = Loading(
        micro, micro, seed=recipe.seed, shuffle=recipe.data.shuffle, device=look.device, collate=parts.train.collate,
        quarantine=frozenset(recipe.data.quarantine), on_bad_sample=recipe.data.on_bad_sample,
    )  # fmt: skip
    try:
        step = next(iter(StepBatches(parts.train.dataset, how)), None)
    except DataError as error:
        look.tell([Verdict("fail", "first batch", error.message, error.remedy)])
        return
    if step is None:
        look.tell([Verdict("fail", "first batch", "the training data gave no batch", "check that it is not empty")])
        return
    with untouched(parts.model, parts.loss):
        seed_all(recipe.seed)
        look.seen = seen = first_batch(parts, step.micro[0])
    look.tell(data.scale(look.train, normalised_inside=seen.begins_with_norm))
    look.tell(data.ids_fit(look.train, seen.rows))
    look.tell(data.labels(look.train, seen.classes, ignored_by(seen)))
    for verdicts in (fits, initial_loss, gradients):
        look.tell(verdicts(seen))
    look.tell(right_loss(seen, look.train))


def _trained(look: _Look, job: Job) -> None:
    """The parts that train, the quickest first."""
    budget, bench, seen = look.budget, Sandbox(job), look.seen
    assert seen is not None
    torch.set_num_threads(job.plan.threads)
    bench.keep(budget.read_s)
    step_s = _step_s(job)
    look.tell(resources.speed(bench, look.train, step_s))
    found = learning.range_test(bench, budget_s=budget.range_s, step_s=step_s)
    moved = learning.first_update(bench)
    look.checkup.add(learning.learning_rate(found, job.plan.lr, _num_steps(job, step_s), moved))
    chance = seen.scored.chance() if seen.scored else None
    heart = _by_heart(look, bench, found)
    look.tell(learning.by_heart(heart, inputs_vary=_vary(look.train), chance=chance))
    told = smoke(bench, budget_s=budget.smoke_s, step_s=step_s)
    look.tell(trained(told))
    look.tell(_unrelated(look, told, heart))
    look.tell(diagnosed(told, {each.code for each in look.checkup.verdicts if each.code}))
    look.tell(afterwards(told))


def _step_s(job: Job) -> float:
    """Seconds of a step by the rehearsal: forward and backward, which is nearly all of it."""
    return max(job.plan.step_s or 0.0, 1e-4)


def _num_steps(job: Job, step_s: float) -> float:
    """Of the whole run; of one that is budgeted in time, by the rehearsal."""
    return job.plan.extent.steps or (job.plan.extent.seconds or 0.0) / step_s


def _by_heart(look: _Look, bench: Sandbox, found: LrRange | None) -> Heart:
    """At the likeliest rate, and where that is not good enough at another."""
    tried: list[Heart] = []
    for lr in learning.plausible(found, bench.job.plan.lr):
        tried.append(learning.learn_by_heart(bench, lr=lr, budget_s=look.budget.heart_s))
        if tried[-1].fell >= learning.LEARNED:
            break
    return max(tried, key=lambda heart: heart.fell)


def _vary(train: DatasetSample) -> bool:
    return len({item.mark for item in train.items[:64]}) > 1


def _unrelated(look: _Look, told: Smoke, heart: Heart) -> Iterator[Verdict]:
    """A model that learns a batch by heart, and over all of the data nothing that a guess would not know.

    Whoever guesses by the frequency of classes alone has their entropy as loss.
    """
    labels = look.train.labels()
    if labels is None or look.aligned or look.failed or look.seen is None or look.seen.classes is None:
        return
    if len(told.losses) < STEPS // 2 or told.epochs < 1 or heart.fell < learning.LEARNED:
        return
    entropy = data.entropy(labels)
    best = min(told.ends[1], told.val_loss if told.val_loss is not None else math.inf)
    if best > 0.97 * entropy and len(labels) >= 64:
        yield Verdict(
            "warn",
            "alignment",
            f"neither neighbours nor {told.epochs:.0f} epochs find labels in the inputs: loss {best:.3g}, "
            f"by frequency alone {entropy:.3g}",
            "look at ten samples by eye: labels may be shuffled against the inputs",
            "data.label_feature_misaligned",
        )
