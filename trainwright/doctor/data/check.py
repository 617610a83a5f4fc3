"""Laws of the data: which samples are drawn and evaluated, and whether their values keep a sensible form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainwright.doctor.case import Case
from trainwright.doctor.data import evaluation
from trainwright.doctor.data.facts import (
    SAME,
    DrawsFacts,
    FeaturesFacts,
    LoaderEpochs,
    RowsFacts,
    StandardisedFacts,
)
from trainwright.doctor.finding import ExperimentRequest, Finding, RemedyTrial, finding
from trainwright.doctor.law import Holds, Law, NotApplicable, Verdict

COMPARED = 16
"""Pairs of steps that are compared before anything is said."""
MICRO = 3
"""Equal micro-batches in a step: two are a second look at the same batch (SAM, two views)."""
SHARE = 0.05
"""Of samples or rows: less is an incomplete batch, padding of a sampler, or a few samples that are there twice."""
FACTOR = 100.0
"""By which the scale of all inputs may change: a switch of data within a task is less."""
UNEVEN, GAIN, LEARNED = 10.0, 0.05, 24
"""Between the deviations of two features; share of the loss that must be gained; steps after which that shows."""


def batches_vary(case: Case) -> Iterator[Verdict]:
    """Steps in a row do not all train on the same rows, where the set has more; nor do all micro-batches of a step."""
    facts = case.newest(RowsFacts)
    if facts is None or facts.steps < SAME:
        return
    same, micro = facts.same >= SAME - 1, facts.repeated_micro_steps >= SAME // 2 and facts.repeated_micro >= MICRO
    if same and facts.batch < facts.distinct >= facts.whole and not _has_got_stuck(facts):
        yield Holds(f"{facts.same + 1} steps in a row have the same {facts.batch} rows; all {facts.whole} were read")
    elif same and facts.whole > facts.batch:
        yield _same_batch(facts)
    elif micro:
        yield _same_micro_batches(facts)
    elif same:
        yield Holds(f"every step has the same {facts.batch} rows, and no larger set is known")
    else:
        yield Holds(f"{facts.distinct} rows in {facts.steps} steps")


def _has_got_stuck(facts: RowsFacts) -> bool:
    """Whether a loop that went on from batch to batch stays at one.

    A stage on one batch is a loop of its own; where a loop takes several steps on each batch, it has done so before.
    """
    return facts.is_within and facts.same >= 2 * max(SAME, facts.same_before)


def _same_batch(facts: RowsFacts) -> Finding:
    return finding(
        "law.data.batches_vary",
        "warning",
        facts.steps,
        symptom=f"{facts.same + 1} steps in a row, up to step {facts.same_to}, trained on the same {facts.batch} rows "
        f"of {facts.whole}",
        cause="the batch is taken once and not again: next(iter(loader)), a name that is not assigned anew, an index "
        "that stands still",
        remedy="iterate over the loader, or over the indices, and use what each iteration gives",
        sure=0.9,
        stage="input",
        since_step=max(1, facts.same_to - facts.same),
        evidence=[("rows that were trained on", facts.distinct, facts.whole)],
    )


def _same_micro_batches(facts: RowsFacts) -> Finding:
    return finding(
        "law.data.batches_vary",
        "warning",
        facts.steps,
        symptom=f"the {facts.repeated_micro} micro-batches of a step are the same rows, in "
        f"{facts.repeated_micro_steps} of {facts.steps} steps",
        cause="each micro-batch reads the same part of the batch: an index or a name that stands still",
        remedy="take a part of its own for each backward pass",
        sure=0.8,
        stage="input",
        evidence=[("equal micro-batches in a step", facts.repeated_micro, 1)],
    )


def batches_are_disjoint(case: Case) -> Iterator[Verdict]:
    """Steps that follow each other share no more rows than steps that are further apart."""
    facts = case.newest(RowsFacts)
    if facts is None or facts.compared < COMPARED:
        return
    excess = facts.shared_next - facts.shared_far
    share = excess / max(1, facts.batch)
    if facts.new_lately > SHARE:
        yield NotApplicable("training still meets new rows: it may be a window that moves over a stream")
        return
    if facts.partly < 0.8 * facts.compared or facts.shared_next < 3 * facts.shared_far + 0.5:
        yield Holds(f"{facts.compared} pairs of steps share {facts.shared_next:.3g} rows of {facts.batch}")
        return
    yield finding(
        "law.data.batches_are_disjoint",
        "warning" if share >= SHARE else "info",
        facts.steps,
        symptom=f"each step reads {facts.shared_next:.3g} of its {facts.batch} rows from the step before again",
        cause="the batches are cut so that they overlap: a stride that is less than the size of a batch",
        remedy="move on by as many rows as a batch has",
        sure=0.8,
        stage="input",
        since_step=1,
        evidence=[
            ("rows that steps in a row share, on the mean", round(facts.shared_next, 2), round(facts.shared_far, 2)),
            ("pairs of steps that share some", facts.partly, 0),
        ],
    )


def samples_are_drawn(case: Case) -> Iterator[Verdict]:
    """Over two epochs a loader draws every sample, and in one epoch each once."""
    facts = case.newest(DrawsFacts)
    if facts is None or not facts.epochs:
        return
    plain = [each for each in facts.epochs if not each.chosen]
    if not plain:
        yield NotApplicable("the samplers are made for a part of the data, or draw some samples several times")
        return
    never = [each for each in plain if each.never - each.tail > SHARE * each.samples and each.same_set]
    twice = [each for each in plain if each.drawn - each.distinct > SHARE * each.drawn]
    if never:
        yield _never(case, never[0])
    elif twice:
        yield finding(
            "law.data.samples_are_drawn",
            "info",
            case.last_step,
            symptom=f"{twice[0].drawn - twice[0].distinct} of {twice[0].drawn} draws of an epoch were of samples that "
            "had come before",
            cause=f"{twice[0].sampler} draws some samples several times; fine if that is intended",
            remedy="a sampler that draws each sample once",
            sure=0.5,
            stage="input",
            evidence=[("samples of the epoch that differ", twice[0].distinct, twice[0].drawn)],
        )
    else:
        yield Holds(f"two epochs of {max(each.samples for each in plain)} samples")


def _never(case: Case, epochs: LoaderEpochs) -> Finding:
    return finding(
        "law.data.samples_are_drawn",
        "warning",
        case.last_step,
        symptom=f"{epochs.never} of {epochs.samples} samples were not drawn in two epochs, and these drew the same "
        "others",
        cause="the loop leaves each epoch early, or the sampler leaves out a part of the data",
        remedy="go through the whole epoch, or shuffle, so that each epoch has another part",
        sure=0.8,
        stage="input",
        evidence=[
            ("samples drawn in an epoch", epochs.distinct, epochs.samples),
            ("first that never came", list(epochs.first_never), []),
        ],
    )


def given_loader_is_read(case: Case) -> Iterator[Verdict]:
    """Of the loaders that the watch was given, one at least is trained on, where any loader is."""
    facts = case.newest(DrawsFacts)
    if facts is None:
        return
    if not facts.given:
        yield NotApplicable("no loader was given")
    elif facts.given_read or facts.others_trained < SAME:
        yield Holds(f"{facts.given_read} of {facts.given} loaders are read")
    else:
        yield finding(
            "law.data.given_loader_is_read",
            "warning" if facts.others_evaluated else "info",
            case.last_step,
            symptom=f"the loader that the watch was given is not read, and {facts.others_trained} batches of another "
            "one are trained on" + (", which is evaluated as well" if facts.others_evaluated else ""),
            cause="the loop goes over another loader: that of the evaluation, or one that was made anew",
            remedy="train on the training loader, or give the watch the one that is meant",
            sure=0.8,
            stage="input",
            evidence=[("given loaders that are read", 0, facts.given)],
        )


def features_share_a_scale(case: Case) -> Iterator[Verdict]:
    """Where features vary unequally, or far from 0, the same steps do not learn far more with standardised inputs."""
    known = next(((step, each) for step, each in reversed(case.every(FeaturesFacts)) if each.features > 1), None)
    if known is None:
        return
    step, facts = known
    if facts.largest is None or facts.smallest is None:
        return
    is_even = facts.largest.std < UNEVEN * facts.smallest.std
    is_far = facts.farthest is not None and abs(facts.farthest.mean) > UNEVEN * facts.farthest.std
    if is_even and not is_far:
        yield Holds(f"{facts.features} features, of deviations {facts.smallest.std:.3g} to {facts.largest.std:.3g}")
        return
    trial = case.newest(StandardisedFacts)
    if trial is not None:
        yield _judged(step, facts, trial, is_even=is_even)
    elif (why := case.blind(StandardisedFacts)) is not None:
        yield NotApplicable(why)
    elif step >= LEARNED or case.finished:
        yield ExperimentRequest(StandardisedFacts.experiment)


def _judged(step: int, facts: FeaturesFacts, trial: StandardisedFacts, *, is_even: bool) -> Verdict:
    was, now = trial.as_it_was, trial.standardised
    if len(was) < LEARNED // 2 or len(now) != len(was):
        return NotApplicable("too few steps can be run again")
    first, (end, other) = was[0], map(_last_quarter, (was, now))
    if not first - other > max(1.2 * (first - end), first - end + GAIN * abs(first)):
        return Holds(f"the loss comes to {end:.3g} in {len(was)} steps, and with standardised inputs to {other:.3g}")
    largest, smallest, farthest = facts.largest, facts.smallest, facts.farthest
    assert largest is not None and smallest is not None
    what = (
        f"feature {largest.number} varies {largest.std / smallest.std:.2g} times as much as feature {smallest.number}"
    )
    evidence = ("deviations of the two", [largest.std, smallest.std])
    if is_even and farthest is not None:
        what = f"feature {farthest.number} varies by {farthest.std:.3g} around {farthest.mean:.3g}"
        evidence = ("its mean and deviation", [farthest.mean, farthest.std])
    return finding(
        "law.data.features_share_a_scale",
        "warning",
        step,
        symptom=f"{what}; {len(was)} steps take the loss from {first:.3g} to {end:.3g}, with standardised inputs to "
        f"{other:.3g}",
        cause="features are not normalised each by itself: by the mean or deviation of all together, of something "
        "else, or not",
        remedy="standardise each feature, with its own mean and deviation over the training data",
        sure=0.8,
        stage="input",
        evidence=[evidence, (f"loss after {len(was)} steps, as it was and standardised", end, other)],
        trial=RemedyTrial("standardised_inputs"),
    )


def _last_quarter(losses: Sequence[float]) -> float:
    last = losses[-max(1, len(losses) // 4) :]
    return sum(last) / len(last)


def inputs_keep_their_scale(case: Case) -> Iterator[Verdict]:
    """The scale of all inputs together does not change by orders of magnitude, and what varied goes on to vary."""
    known = [(step, facts) for step, facts in case.every(FeaturesFacts) if facts.rows > 1]
    if len(known) < 2:
        return
    (begin, first), (step, last) = known[0], known[-1]
    ratio = last.rms / first.rms if first.rms else 1.0
    stands = bool(first.usual and not last.usual)
    if 1 / FACTOR < ratio < FACTOR and not stands:
        yield Holds(f"root mean square {first.rms:.3g} at step {begin}, {last.rms:.3g} at step {step}")
        return
    yield finding(
        "law.data.inputs_keep_their_scale",
        "warning",
        step,
        symptom="no feature of the inputs varies any more"
        if stands
        else f"the inputs {'grow' if ratio > 1 else 'shrink'}: root mean square {first.rms:.3g} at step {begin}, "
        f"{last.rms:.3g} at step {step}",
        cause="the data are changed in place again and again, or a state of the preprocessing runs away",
        remedy="print mean and deviation of the inputs of some steps; look for *=, .mul_, .sub_ on the data",
        sure=0.8,
        stage="input",
        evidence=[("root mean square of the inputs", last.rms, first.rms)],
    )


_SCALE = ("data.unnormalised_input", "data.double_normalised", "data.constant_input", "data.nonfinite_input")

LAWS: tuple[Law, ...] = (
    Law("data.batches_vary", batches_vary, named_by=("data.constant_input",)),
    Law("data.batches_are_disjoint", batches_are_disjoint),
    Law("data.samples_are_drawn", samples_are_drawn),
    Law("data.given_loader_is_read", given_loader_is_read),
    Law("data.evaluation_is_apart", evaluation.evaluation_is_apart, named_by=("data.train_val_overlap",)),
    Law("data.evaluation_is_alike", evaluation.evaluation_is_alike),
    Law("data.evaluation_is_the_same", evaluation.evaluation_is_the_same),
    Law("data.evaluated_batches_are_used", evaluation.evaluated_batches_are_used),
    Law("data.evaluation_goes_on", evaluation.evaluation_goes_on),
    Law("data.features_share_a_scale", features_share_a_scale, effort="replay", named_by=_SCALE),
    Law("data.inputs_keep_their_scale", inputs_keep_their_scale, effort="replay", named_by=_SCALE),
)
