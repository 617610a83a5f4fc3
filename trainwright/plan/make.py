"""Makes the Plan from a recipe and facts. Notes in the plan state the reasons of its decisions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, cast

from trainwright.errors import Problem, Problems, RecipeError
from trainwright.plan.amounts import human_seconds
from trainwright.plan.batch import BatchPlan, UserBatches, batch_of, require_fits, scale_lr
from trainwright.plan.duration import Extent, Interval, Pace, extent, interval, span
from trainwright.plan.header import RunHeader
from trainwright.plan.parallel import ONE_RANK, Degrees, solve_layout
from trainwright.recipe import Duration, Recipe

PrecisionName = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8"]
# Minimum speed-up for which `precision: auto` chooses bf16 over fp32 on a CPU. No threshold clearly separates models
# that bf16 speeds up from others: the built-in recipes gain factors of 0.4 to 1.5, and even at 1.3 two starts of BERT
# chose different precisions. 1.03 is the largest slowdown that `benchmarks.auto` accepts.
BF16_PAYS_ABOVE = 1.03
# Minimum speed-up for which fewer threads are chosen. It is above the noise of the timing. Fewer threads are faster
# only if threads wait for cores, and then by large factors.
FEWER_THREADS_PAY_ABOVE = 2.0


@dataclass(frozen=True)
class Note:
    """One decision: the choice and its reason."""

    topic: str
    choice: str
    why: str


@dataclass(frozen=True)
class RunFacts:
    """Facts about the live objects before the run. Samples are per epoch; None for a stream without a length.

    ``own_batches`` describes the user's batches, None if Trainwright makes the batches. ``tokens_per_sample`` is 0 if
    inputs are no token ids. ``classes`` is None if targets are no classes.

    ``low_precision`` is what the device computes in hardware: a subset of ("tf32", "bf16", "fp16", "fp8", "mxfp8");
    ``threads`` are the numbers of CPU threads to choose from, the largest first.
    """

    train_samples: int | None
    tokens_per_sample: int
    parameters: int
    trainable: int
    device: str
    device_name: str
    low_precision: tuple[str, ...] = ()
    threads: tuple[int, ...] = (1,)
    classes: int | None = None
    notes: tuple[Note, ...] = ()
    own_batches: UserBatches | None = None


@dataclass(frozen=True)
class Spent:
    """The counters of a run at the last change of its batch size. ``position`` counts the samples in the epoch."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    epoch: int = 0
    position: int = 0


@dataclass(frozen=True)
class SwaPlan:
    """Stochastic weight averaging: the optimizer step of the first average, and the steps between two averages.

    ``anneal`` is the number of averages until the learning rate reaches ``model.swa.lr``.
    """

    start: int
    every: int
    anneal: int


@dataclass(frozen=True)
class ResumedValues:
    """Values that a resumed run takes from its earlier plan, even if its length or batch changed.

    A value of None is planned again.
    """

    warmup: int | float | None = None
    keep_every: int | None = None
    spent: Spent = Spent()
    evaluate_batches: int | None = None
    swa: SwaPlan | None = None


@dataclass(frozen=True)
class Cadence:
    """When a run evaluates, saves and logs.

    An evaluation during the run takes ``evaluate_batches`` batches, 0 for the full set. If ``evaluates_whole``, the
    full set is evaluated at the end.
    """

    evaluate_every: Interval
    evaluate_batches: int
    save_every: Interval | None
    keep_every: int | None
    log_every: Interval
    evaluates_whole: bool = True


@dataclass(frozen=True)
class Predicted:
    """Predictions and measurements from before the first step. Bytes are for one rank.

    Attributes:
        expected_loss: The loss of a classifier that guesses; None for other models.
        initial_loss: The loss of the untrained model; None in a resumed run.
        memory_bytes: Bytes by kind.
        step_s: Time of a step, including ``wait_s``.
        wait_s: Time in a step in which it waits for its batch.
        seconds: The wall-clock time that is left, by activity.
        ends_in_s: Wall-clock limit from the first step to the end of the run; None if there is none.
    """

    expected_loss: float | None = None
    initial_loss: float | None = None
    memory_bytes: Mapping[str, int] | None = None
    step_s: float | None = None
    wait_s: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    ends_in_s: float | None = None


@dataclass(frozen=True)
class Plan:
    """All derived numbers.

    ``lr`` is None if it is the default of an optimizer that is not built-in, until this optimizer is made. ``warmup``
    is a number of steps (int), or a fraction of a run that is budgeted in time (float). ``settled`` are values that the
    recipe left open and that were resolved before the model was built. ``header`` names every setting and its origin.
    """

    device: str
    device_name: str
    precision: PrecisionName
    threads: int
    batch: BatchPlan
    extent: Extent
    steps_per_epoch: int | None
    lr: float | None
    warmup: int | float
    cadence: Cadence
    parameters: int
    trainable: int
    predicted: Predicted = Predicted()
    degrees: Degrees = ONE_RANK
    spent: Spent = Spent()
    swa: SwaPlan | None = None
    settled: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    header: RunHeader = field(default_factory=RunHeader)

    def to_json(self) -> dict[str, object]:
        """Return the content of plan.json, with the fields of ``cadence`` and ``predicted`` at the top level."""
        values = asdict(self)
        groups = values.pop("cadence"), values.pop("predicted")
        return {**values, **groups[0], **groups[1]}


def make_plan(recipe: Recipe, facts: RunFacts, *, ranks: int = 1, kept: ResumedValues = ResumedValues()) -> Plan:
    """Decide everything that needs no dry run. Raises RecipeError if data or ``ranks`` cannot satisfy the recipe."""
    user_batches = facts.own_batches
    degrees, batch = arrange(recipe, ranks, user_batches)
    per_epoch = _steps_per_epoch(facts.train_samples, batch.size, recipe.data.drop_last)
    if user_batches is not None and user_batches.count is not None:
        per_epoch = math.ceil(user_batches.count / (recipe.batch.accumulation or 1))
    pace = Pace(batch.size, per_epoch, facts.tokens_per_sample)
    whole = _extent(recipe, facts, pace, kept.spent)
    save, problems = recipe.checkpoint.every, Problems()
    with problems.at("schedule.warmup"):
        written = recipe.schedule.warmup
        warmup = span(written, whole, pace, "schedule.warmup") if kept.warmup is None else kept.warmup
        warmup = _checked_warmup(recipe, warmup, whole)
    with problems.at("evaluation.every"):
        evaluate_every = interval(recipe.evaluation.every, whole, pace, "evaluation.every")
    with problems.at("checkpoint.every"):
        save_every = None if save is None else interval(save, whole, pace, "checkpoint.every")
    with problems.at("checkpoint.keep_every"):
        keep_every = kept.keep_every or _keep_every(recipe, whole, pace)
    with problems.at("log.every"):
        log_every = interval(recipe.log.every, whole, pace, "log.every")
    with problems.at("model.swa"):
        swa = kept.swa or _swa(recipe, whole, pace)
    problems.raise_if_any()
    lr, lr_note = _learning_rate(recipe, batch.size)
    return Plan(
        device=facts.device,
        device_name=facts.device_name,
        precision="fp32",
        threads=facts.threads[0],
        batch=batch,
        degrees=degrees,
        extent=whole,
        steps_per_epoch=per_epoch,
        lr=lr,
        warmup=warmup,
        cadence=Cadence(
            evaluate_every=evaluate_every,
            evaluate_batches=recipe.evaluation.batches or kept.evaluate_batches or 0,
            save_every=save_every,
            keep_every=keep_every,
            log_every=log_every,
        ),
        parameters=facts.parameters,
        trainable=facts.trainable,
        spent=kept.spent,
        swa=swa,
        notes=(
            *facts.notes,
            *(
                _batch_notes(batch, facts.train_samples)
                if user_batches is None
                else _user_batch_notes(recipe, user_batches)
            ),
            *(_cost_of_exact(batch, facts) if recipe.parallel.exact else ()),
            *_steps_left_notes(recipe, whole, kept.spent),
            *lr_note,
        ),
    )


def arrange(recipe: Recipe, ranks: int, user_batches: UserBatches | None = None) -> tuple[Degrees, BatchPlan]:
    """Return the layout over ``ranks``, and the batch. ``user_batches`` describes the user's own batches, if any.

    Raises RecipeError with everything that cannot be done on this number of ranks.
    """
    problems, degrees = Problems(), ONE_RANK
    with problems.at("parallel"):
        degrees = solve_layout(recipe, ranks)
    with problems.at("batch.micro"):
        _require_slices(recipe)
    with problems.at("data.on_bad_sample"):
        _require_one_rank_for_quarantine(recipe, ranks)
    with problems.at("batch"):
        if user_batches is not None:
            require_fits(recipe, user_batches, ranks)
        batch = batch_of(recipe.batch, user_batches, ranks=degrees.data)
    problems.raise_if_any()
    return degrees, batch


def _require_slices(recipe: Recipe) -> None:
    if recipe.parallel.exact and not isinstance(recipe.batch.micro, int):
        rule = "is needed by parallel.exact: the slices of a step must not follow from the number of ranks"
        remedy = "write how many samples a slice has: as few as the largest number of ranks gets of a batch"
        raise RecipeError(Problem("batch.micro", rule, got=str(recipe.batch.micro), remedy=remedy))


def _require_one_rank_for_quarantine(recipe: Recipe, ranks: int) -> None:
    if ranks > 1 and recipe.data.on_bad_sample == "quarantine":
        rule = "cannot be quarantine with several ranks: each finds other bad samples, and would leave out others"
        remedy = "train an epoch in one process, or list the samples in data.quarantine"
        raise RecipeError(Problem("data.on_bad_sample", rule, got="quarantine", remedy=remedy))


def _extent(recipe: Recipe, facts: RunFacts, pace: Pace, spent: Spent) -> Extent:
    used: dict[str, float] = {"steps": spent.step, "samples": spent.samples, "tok": spent.tokens}
    if facts.train_samples is not None and pace.steps_per_epoch is not None:
        rest = max(0, facts.train_samples - spent.position)  # rest of the epoch in which the batch size changed
        left = _steps_in(rest, pace.batch_size, recipe.data.drop_last)
        used["ep"] = spent.epoch + 1 - left / pace.steps_per_epoch
    elif facts.own_batches is not None:
        used["ep"] = spent.epoch  # the fraction of an epoch is unknown
    return extent(recipe.until, pace, step=spent.step, used=used.get(recipe.until.unit, 0.0))


def _keep_every(recipe: Recipe, whole: Extent, pace: Pace) -> int | None:
    keep = recipe.checkpoint.keep_every
    if keep is None:
        return None
    steps = interval(keep, whole, pace, "checkpoint.keep_every").steps
    if steps is None:
        rule = "must be a number of steps: the run is budgeted in time"
        raise RecipeError(Problem("checkpoint.keep_every", rule, got=str(keep), remedy="write for example 1000steps"))
    return steps


def _swa(recipe: Recipe, whole: Extent, pace: Pace) -> SwaPlan | None:
    swa = recipe.model.swa
    if swa is None:
        return None
    start = span(swa.start, whole, pace, "model.swa.start")
    every = interval(swa.every, whole, pace, "model.swa.every").steps
    anneal = Duration(0, "steps") if swa.lr is None else swa.anneal
    annealed = span(anneal, whole, pace, "model.swa.anneal")
    for name, written, found in (
        ("start", swa.start, start),
        ("every", swa.every, every),
        ("anneal", anneal, annealed),
    ):
        if not isinstance(found, int):
            rule = "must be a number of steps: the run is budgeted in time"
            raise RecipeError(
                Problem(f"model.swa.{name}", rule, got=str(written), remedy="write for example 1000steps")
            )
    assert isinstance(start, int) and every is not None
    if whole.steps is not None and start > whole.steps:
        rule = f"is step {start}, after the end of the run at step {whole.steps}"
        raise RecipeError(Problem("model.swa.start", rule, got=str(swa.start), remedy="write for example 0.75run"))
    return SwaPlan(max(1, start), every, round(annealed / every))


def with_dry_run(
    plan: Plan,
    *,
    precision: str | None,
    facts: RunFacts,
    loss: float,
    outputs: int | None,
    seconds: Mapping[tuple[PrecisionName, int], float],
    thread_s: Mapping[tuple[PrecisionName, int], float],
    memory_bytes: Mapping[str, int],
) -> Plan:
    """Return the plan with the results of the dry run of the first batch: precision, memory, time, initial loss.

    ``precision`` is the recipe's. ``outputs`` is the last dimension of the model's output: an untrained classifier with
    this many classes has the loss ln(outputs). ``seconds`` is the time of one step's forward and backward, by precision
    and number of threads; ``thread_s`` is its processor time in the calling thread. The dry run times the first
    precision with every number of threads, every precision with one thread, and the combination that ``choose_mode``
    returns. If memory is short, it times only the first combination.
    """
    threads, thread_notes = choose_threads(facts.threads, seconds)
    chosen, note = choose_precision(precision, facts.device, facts.low_precision, _of_one_thread(thread_s))
    return replace(
        plan,
        precision=chosen,
        threads=threads,
        predicted=replace(
            plan.predicted,
            initial_loss=loss,
            expected_loss=math.log(outputs) if facts.classes and outputs else None,
            memory_bytes=dict(memory_bytes),
            step_s=seconds[chosen, threads],
        ),
        notes=(*plan.notes, *thread_notes, note),
    )


def choose_mode(
    setting: str | None,
    facts: RunFacts,
    seconds: Mapping[tuple[PrecisionName, int], float],
    thread_s: Mapping[tuple[PrecisionName, int], float],
) -> tuple[PrecisionName, int]:
    """Return the precision and the number of threads from the dry run's timings; arguments as in ``with_dry_run``."""
    chosen, _ = choose_precision(setting, facts.device, facts.low_precision, _of_one_thread(thread_s))
    return chosen, choose_threads(facts.threads, seconds)[0]


def _of_one_thread(thread_s: Mapping[tuple[PrecisionName, int], float]) -> dict[PrecisionName, float]:
    """Return the times by precision, with the fewest threads that were timed."""
    return {name: work_s for (name, _), work_s in sorted(thread_s.items(), key=lambda each: -each[0][1])}


def candidates(setting: str | None, device: str, low_precision: tuple[str, ...]) -> tuple[PrecisionName, ...]:
    """Return the precisions worth timing in the dry run. ``setting`` is the recipe's."""
    if setting == "auto" and device == "cpu" and "bf16" in low_precision:
        return ("fp32", "bf16")
    return (choose_precision(setting, device, low_precision, {})[0],)


def choose_threads(
    counts: tuple[int, ...], seconds: Mapping[tuple[PrecisionName, int], float]
) -> tuple[int, tuple[Note, ...]]:
    """Return the largest number of threads, unless a smaller one is much faster because threads wait for cores."""
    if len(counts) == 1:
        return counts[0], ()
    precision = next(name for name, _ in seconds)
    counts = tuple(count for count in counts if (precision, count) in seconds)
    by_count = {count: seconds[precision, count] for count in counts}
    if len(by_count) == 1:
        return counts[0], (Note("threads", str(counts[0]), "memory is too short to try fewer"),)
    fastest = min(counts, key=lambda count: by_count[count])
    chosen = fastest if by_count[counts[0]] > FEWER_THREADS_PAY_ABOVE * by_count[fastest] else counts[0]
    timed = " and ".join(f"{human_seconds(took)} with {count}" for count, took in by_count.items())
    return chosen, (Note("threads", str(chosen), f"measured in the dry run: one step takes {timed}"),)


def choose_precision(
    setting: str | None, device: str, low_precision: tuple[str, ...], seconds: Mapping[PrecisionName, float]
) -> tuple[PrecisionName, Note]:
    """Return the precision of the forward pass, and the reason. ``setting`` is the recipe's.

    ``seconds`` is the processor time of a step in one thread, so other load on the machine does not affect it.
    """
    if setting == "tf32" and device == "cpu":
        return "fp32", Note("precision", "fp32", "tf32 is a mode of NVIDIA tensor cores; a CPU has none")
    if setting is None:
        return "fp32", Note("precision", "fp32", "the default; TF32 only where torch is set to use it")
    if setting != "auto":
        return cast(PrecisionName, setting), Note("precision", setting, "set in the recipe")
    if device != "cpu":
        if "bf16" in low_precision:
            return "bf16", Note("precision", "bf16", "the GPU has bf16 tensor cores; no loss scale is needed")
        return "fp16", Note("precision", "fp16", "the GPU has no bf16; fp16 with dynamic loss scaling")
    if "bf16" not in seconds:
        why = "this CPU computes no bf16 in hardware"
        if "bf16" in low_precision:
            why = "memory is limited or too short, so bf16 was not tried" if seconds else "bf16 was not timed"
        return "fp32", Note("precision", "fp32", why)
    gain = seconds["fp32"] / (seconds["bf16"] or 1.0)  # 0 where the clock is too coarse
    timed = (
        f"one thread works {human_seconds(seconds['fp32'])} a step in fp32 and {human_seconds(seconds['bf16'])} in bf16"
    )
    chosen: PrecisionName = "bf16" if gain > BF16_PAYS_ABOVE else "fp32"
    return chosen, Note("precision", chosen, f"measured in the dry run: {timed}")


FP8_DEVICES = {
    "fp8": "NVIDIA GPUs from Ada and Hopper on (compute capability 8.9)",
    "mxfp8": "NVIDIA GPUs from Blackwell on (compute capability 10.0)",
}


def require_fp8(recipe: Recipe, device: str, low_precision: tuple[str, ...]) -> None:
    """Raise RecipeError where the recipe trains in fp8 or mxfp8 and ``device`` does not compute it in hardware."""
    name = recipe.precision
    if name not in FP8_DEVICES or name in low_precision or (recipe.fp8 is not None and recipe.fp8.emulate):
        return
    nearest = next((each for each in ("fp8", "bf16", "fp16") if each in low_precision and each != name), "bf16")
    rule = f"{device} does not compute {name} in hardware; {FP8_DEVICES[name]} do"
    remedy = (
        f"write precision: {nearest}, the nearest; fp8.emulate: true rounds as {name} does, but is slower than fp32"
    )
    raise RecipeError(Problem("precision", rule, got=name, remedy=remedy))


def _steps_per_epoch(samples: int | None, batch: int, drop_last: bool) -> int | None:
    if samples is None:
        return None
    if samples == 0:
        remedy = "check its arguments and where it reads from"
        raise RecipeError(Problem("data.train", "the training set is empty", remedy=remedy))
    count = _steps_in(samples, batch, drop_last)
    if count == 0:
        rule = f"an epoch would have no step: {samples} samples are fewer than one batch of {batch}"
        remedy = f"set data.drop_last: false, or batch.size to at most {samples}"
        raise RecipeError(Problem("data.drop_last", rule, got="true", remedy=remedy))
    return count


def _steps_in(samples: int, batch: int, drop_last: bool) -> int:
    return samples // batch if drop_last else math.ceil(samples / batch)


def _checked_warmup(recipe: Recipe, warmup: int | float, whole: Extent) -> int | float:
    """Return the warm-up.

    Raises RecipeError unless it is shorter than the run; a fraction may be above 1 by a rounding error.
    """
    if isinstance(warmup, int) and whole.steps is not None and warmup >= whole.steps > 0 and warmup > 0:
        raise _too_long(recipe, f"{warmup} steps", f"{whole.steps} steps", f"{max(1, whole.steps // 10)}steps")
    if isinstance(warmup, float) and whole.seconds is not None and warmup > 1 + 1e-9:
        raise _too_long(recipe, f"{warmup * whole.seconds:g} s", f"{whole.seconds:g} s", f"{whole.seconds / 10:g}s")
    return min(warmup, 1.0) if isinstance(warmup, float) else warmup


def _too_long(recipe: Recipe, warmup: str, total: str, better: str) -> RecipeError:
    rule = f"the warm-up of {warmup} is not shorter than the run of {total} (until: {recipe.until})"
    remedy = f"shorten it, for instance to {better}, or lengthen `until`"
    return RecipeError(Problem("schedule.warmup", rule, got=str(recipe.schedule.warmup), remedy=remedy))


def _steps_left_notes(recipe: Recipe, whole: Extent, spent: Spent) -> list[Note]:
    if not spent.step or whole.steps is None:
        return []
    why = f"what was left of {recipe.until} when the batch changed its size at step {spent.step}"
    return [Note("steps left", str(whole.steps - spent.step), why)]


def _learning_rate(recipe: Recipe, batch: int) -> tuple[float | None, tuple[Note, ...]]:
    """Return the learning rate, scaled by ``lr_rule``, with its note.

    The rate is None if it is the default of an optimizer that is not built-in: it is known when the optimizer is made.
    """
    rule = recipe.optimizer.lr_rule.rule
    base = recipe.optimizer.lr_rule.base_batch
    lr = recipe.optimizer.lr
    if rule == "none" or base is None:
        return lr, ()
    if lr is None:
        why = f"is required by lr_rule.rule: {rule}"
        raise RecipeError(Problem("optimizer.lr", why, remedy=f"give the learning rate for a batch of {base}"))
    scaled = scale_lr(lr, rule=rule, batch=batch, base_batch=base)
    why = f"{rule} rule: {lr:g} at a batch of {base}, times {scaled / lr:.4g} for a batch of {batch}"
    return scaled, (Note("learning rate", f"{scaled:g}", why),)


def _cost_of_exact(batch: BatchPlan, facts: RunFacts) -> list[Note]:
    slices = batch.accumulation * batch.ranks
    mib = slices * facts.trainable * 4 / 2**20
    why = f"a rank holds the gradients of {batch.accumulation} slices, and gathers up to {mib:,.3g} MiB a step"
    return [Note("exact", f"{slices} slices of {batch.micro} samples", why)]


def _user_batch_notes(recipe: Recipe, user_batches: UserBatches) -> list[Note]:
    joined = recipe.batch.accumulation or 1
    size = f"about {user_batches.size} samples each" if user_batches.size else "of the size that they have"
    step = "one" if joined == 1 else str(joined)
    notes = [Note("batch", f"as the data come, {size}", f"{step} of them {'is' if joined == 1 else 'are'} a step")]
    if user_batches.ready and recipe.data.workers:
        why = "ready batches come from their own iterator"
        notes.append(Note("not used", f"data.workers: {recipe.data.workers}", why))
    return notes


def _batch_notes(batch: BatchPlan, samples: int | None) -> list[Note]:
    notes = [Note("batch", str(batch.size), batch.how.removeprefix("= "))]
    if samples is not None and samples < batch.size:
        notes.append(Note("batch", str(samples), f"the dataset has only {samples} samples: every step takes all"))
    return notes
