import math
import statistics

from trainwright.doctor import ExperimentRequest, NotApplicable, RemedyTrial, Results, RunContext, check
from trainwright.doctor.facts.weights import BatchStepsFacts, UpdateFacts
from trainwright.doctor.trend import still_falls

MIN_LOSS_RISE = 0.5  # Fraction by which an update raises the loss of its own batch
MIN_RATIO, MIN_RATIO_OF_RISE = 0.03, 0.1  # Update / weights, in a run without progress; the second: if the loss rises
MIN_EXPLOSION = 10.0  # Ratio of the losses of a batch after and before an update that explodes
MAX_REQUESTED = 2  # Updates that are replayed because the loss of the run does not fall
MIN_GAIN, MIN_GAIN_RATIO = 0.1, 3.0  # Fall at a smaller rate / loss, and / fall at the rate of the run


@check(stage="update", confidence=0.85, explains=("optim.weight_decay_too_high", "gradient.exploding"))
def lr_too_high(run: RunContext) -> Results:
    """The learning rate is too high: an update raises the loss of its own batch.

    How it is detected: a replay of the update raises the loss of its batch by more than half. Eight such updates on
    that batch also end above its first loss; or the update is larger than a tenth of the weights, and the loss of the
    run has fallen by less than a quarter in 24 steps or more. With a tenth, a hundredth or a thousandth of the learning
    rate, eight updates lower the loss. Or no update raises the loss, the loss of the run has fallen by less than a
    quarter in 24 steps or more, and eight updates at such a lower learning rate lower it three times as much.

    Exceptions: several optimizers (such as a GAN), and runs whose loss has fallen again: to half of its first value if
    an update raised the loss of its batch tenfold.

    Usual cause: a learning rate that is meant for another optimizer or batch size, a missing warm-up, or a loss that is
    a sum instead of a mean.

    Looks like: loss.wrong_sign, where no learning rate helps; data that is not normalized, where the first loss is high
    before any update.

    Fix: use a tenth of the learning rate. Usual values are 1e-4 to 1e-3 for AdamW, and 0.01 to 0.1 for SGD with
    momentum. Add a warm-up over the first 1 to 5 % of the run. `trainwright lr-range recipe.yaml` plots the loss for
    increasing learning rates.

    Sources: AutoTrainer (Zhang et al., ICSE 2021).
    """
    exams = run.every(UpdateFacts)
    if len(exams) < MAX_REQUESTED and _has_not_fallen(run) and not still_falls(run):
        yield from [ExperimentRequest(UpdateFacts.experiment, each) for each in (run.steps[0].step, run.last_step)]
    every = [(step, facts) for step, facts in exams if facts.optimizers == 1]
    if not exams:
        yield ExperimentRequest(UpdateFacts.experiment)
    elif not every:
        yield NotApplicable("several optimizers, between which no loss has to fall")
        return
    known = [(step, facts, facts.loss + MIN_LOSS_RISE * abs(facts.loss)) for step, facts in every if facts.ratio > 0]
    worse = [(step, facts) for step, facts, most in known if math.isfinite(most) and not facts.after <= most][:3]
    if not worse and _has_not_fallen(run):
        large = [(step, facts) for step, facts, _ in known if facts.ratio > MIN_RATIO and facts.loss > 0]
        worse = sorted(large, key=lambda each: each[1].ratio)[-1:]
    yield from [ExperimentRequest(BatchStepsFacts.experiment, step) for step, _ in worse]
    trained = dict(run.every(BatchStepsFacts))
    for step, facts in worse:
        on_batch = trained.get(step)
        explodes = _explodes(run, facts)
        if on_batch is None or on_batch.falls_at is None or (_has_recovered(run) and not explodes):
            continue
        is_large = facts.ratio > MIN_RATIO_OF_RISE and facts.after > (1 + MIN_LOSS_RISE) * facts.loss
        is_stuck = _has_not_fallen(run) and (is_large or _is_better_at_lower_rate(on_batch))
        if not (is_stuck or explodes or _mean(on_batch.losses[-2:]) > facts.loss):
            continue
        limit = 2 * abs(run.steps[0].loss) if run.steps else math.inf
        is_lost = not facts.after < limit or any(not each.loss < limit for each in run.steps)
        rate = max(facts.lr, default=0.0)
        yield run.finding(
            step,
            symptom=f"an update takes the loss of its own batch from {facts.loss:.4g} to {facts.after:.4g}, eight to "
            f"{on_batch.losses[-1]:.4g}",
            cause=f"the learning rate of {rate:g} is too high for this model and batch",
            remedy=f"a learning rate of {rate * on_batch.falls_at:g} or less",
            severity="critical" if is_lost else "warning",
            sure=0.85 if (facts.input_rms or 1.0) < 30 else 0.5,
            evidence=[
                ("update / weights", facts.ratio, "below 0.1"),
                ("learning-rate factor at which the loss falls", on_batch.falls_at),
                ("loss after eight updates at this factor", on_batch.falls_to),
            ],
            trial=RemedyTrial("other_lr", {"factor": on_batch.falls_at}),
        )


def _explodes(run: RunContext, facts: UpdateFacts) -> bool:
    """Returns True if an update raises the loss of its batch tenfold, and the run has not halved its loss since."""
    losses = [each.loss for each in run.steps]
    usual = 3 * max(statistics.median(losses), facts.loss) if losses else math.inf
    return facts.after > max(usual, MIN_EXPLOSION * facts.loss) and 2 * _mean(losses[-8:]) > losses[0] > 0


def _has_recovered(run: RunContext) -> bool:
    """Returns True if the loss is far below its first value and near its lowest."""
    losses = [each.loss for each in run.steps]
    if len(losses) < 12:
        return False
    first, now = losses[0], _mean(losses[-4:])
    low = min(_mean(losses[i : i + 4]) for i in range(len(losses) - 3))
    return now < first - 0.2 * abs(first) and now - low < 0.3 * (first - low)


def _is_better_at_lower_rate(on_batch: BatchStepsFacts) -> bool:
    """Returns True if updates with a fraction of the learning rate lower the loss of a batch much more."""
    first, to = on_batch.losses[0], on_batch.falls_to
    gain = 0.0 if to is None else first - to
    return gain > max(MIN_GAIN * abs(first), MIN_GAIN_RATIO * (first - _mean(on_batch.losses[-2:])))


def _has_not_fallen(run: RunContext) -> bool:
    losses = [each.loss for each in run.steps]
    return len(losses) >= 24 and not _mean(losses[-4:]) < losses[0] - 0.25 * abs(losses[0])


def _mean(losses: list[float] | tuple[float, ...]) -> float:
    """Returns the mean; infinity if one value is NaN."""
    mean = sum(losses) / max(1, len(losses))
    return math.inf if math.isnan(mean) else mean
