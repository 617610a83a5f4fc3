"""Laws of the evaluation: it reads the same rows each time, none that are trained on, and tells what can be true."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.data.facts import (
    ChosenRows,
    DrawsFacts,
    EvaluatedPart,
    EvaluatedRows,
    EvaluationFacts,
    Likeness,
    RowsFacts,
    SharedSamplesFacts,
)
from trainwright.doctor.finding import Finding, Severity, finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict

TWICE = 2
"""Passes: in one of them a loop may try something."""
SHARE = 0.05
"""Of rows: less is a few that are there twice."""
CHANCE = 2.0
"""Times the rows that are equal by chance."""
EARLY, LONG = 4, 32
"""Steps before which an evaluation is a test of itself; steps of a run that is long enough to evaluate again."""
SHIFT, SCALE, CERTAIN = 1.0, 2.0, 6.0
"""Deviations between the means, and between the deviations a factor: augmentation changes both by less. Standard errors
that a shift must have."""
FAR = 5.0
"""Deviations, and a factor, that no other time or place of the same data is away."""
PART_SHIFT = 1.5
"""Deviations of a tenth of the features, where the evaluation suffers."""
WORSE = 2.0
"""Times the losses of training: a loss that the evaluation suffers in."""
ENOUGH = 8
"""Losses of training to compare with."""


def evaluation_is_apart(case: Case) -> Iterator[Verdict]:
    """No row of an evaluation is also trained on, unless the evaluation is of training rows on purpose."""
    facts, evaluated = case.newest(RowsFacts), case.newest(EvaluationFacts)
    if evaluated is not None and evaluated.chosen:
        yield _choices_are_apart(evaluated)
        return
    if (sets := case.newest(SharedSamplesFacts)) is not None and sets.shared <= sets.by_chance:
        yield Holds(f"{sets.compared} of {sets.samples} validation samples are not in the training set, by {sets.by}")
        return
    if facts is None or not facts.evaluations:
        return
    if facts.new_lately > SHARE:
        yield NotApplicable("training still meets new rows")
        return
    last = facts.evaluations[-1]
    parts = [each for each in last.parts if _overlaps(each, last.trained, is_continuous=facts.is_continuous)]
    known = [each for each in parts if each.has_source or _is_mixed(each)]
    if known:
        worst = max(known, key=lambda each: each.shared)
        severity: Severity = "info" if worst.shared >= (1 - SHARE) * last.trained else "warning"
        yield _overlap(facts.steps, worst.shared, worst.distinct, "by their content", severity)
    elif any(each.shared > SHARE * each.distinct for each in last.parts):
        yield NotApplicable("evaluated rows are training rows on purpose, or rows may be equal by chance")
    else:
        yield Holds(f"{last.rows} evaluated rows are not trained on")


def _overlaps(part: EvaluatedPart, trained: int, *, is_continuous: bool) -> bool:
    """Whether a part of the rows, and not all of them, are trained on: more than are equal by chance.

    A part of which every row is trained on is an evaluation of the training rows. Of whole numbers, the repeats within
    the part show how many rows are equal by chance.
    """
    repeats = part.rows - part.distinct + (not is_continuous)
    by_chance = 2.0 * repeats * trained / max(1, part.rows)
    is_in_part = SHARE * part.distinct < part.shared < (1 - SHARE) * part.distinct
    return is_in_part and part.shared > CHANCE * by_chance


def _is_mixed(part: EvaluatedPart) -> bool:
    """Whether calls read both kinds of rows, and not first the ones and then the others."""
    return bool(part.mixed) and not (part.calls >= 4 and part.mixed <= 2)


def _choices_are_apart(facts: EvaluationFacts) -> Verdict:
    """Of outputs for the same inputs, as the nodes of a graph, training and evaluation choose other rows."""
    broken = next((each for each in facts.chosen if _is_trained_on(each)), None)
    if broken is not None:
        return _overlap(facts.after, broken.shared, broken.rows, "by their places and their targets", "warning")
    last = facts.chosen[-1]
    return Holds(f"{last.rows} rows of the evaluation are chosen, {last.shared} of them trained on")


def _is_trained_on(chosen: ChosenRows) -> bool:
    """Whether it has a part of what is trained on beside others; or, where nearly all are, nothing but such."""
    if chosen.alike < chosen.shared or chosen.shared >= (1 - SHARE) * chosen.trained:
        return False  # answers of a model took the place of targets; or all that is trained on is evaluated
    share = chosen.shared / chosen.rows
    return SHARE < share < 1 - SHARE or (share >= 1 - SHARE and chosen.trained >= (1 - SHARE) * chosen.size)


def _overlap(step: int, shared: int, rows: int, by: str, severity: Severity) -> Finding:
    return finding(
        "law.data.evaluation_is_apart",
        severity,
        max(1, step),
        symptom=f"{shared} of {rows} rows of the evaluation are also trained on, {by}",
        cause="the parts of the data for training and for evaluation overlap",
        remedy="cut the data once, before anything else, and check that no row is in both parts",
        sure=0.85,
        stage="input",
        evidence=[("share of evaluated rows that are trained on", round(shared / max(1, rows), 3), 0.0)],
    )


def evaluation_is_alike(case: Case) -> Iterator[Verdict]:
    """The inputs of an evaluation lie where those of training lie, and vary as much."""
    facts = case.newest(EvaluationFacts)
    if facts is None:
        return
    likeness = facts.likeness
    if likeness is None:
        yield NotApplicable("too few samples of floating-point inputs are known of both")
        return
    is_moved = likeness.shift > max(SHIFT, CERTAIN * likeness.noise)
    suffers = _suffers(case, facts)
    if likeness.is_cut:
        yield _cut(facts, "info" if suffers is False else "warning")
        return
    if likeness.is_cropped:
        yield _cropped(facts, likeness)
        return
    if is_moved or not 1 / SCALE < likeness.ratio < SCALE:
        is_sure = _is_far(likeness) if suffers is None else suffers
        yield _unlike(facts, likeness, "inputs", "warning" if is_sure else "info")
        return
    if suffers and likeness.part_shift > max(PART_SHIFT, CERTAIN * likeness.noise):
        yield _partly_unlike(facts, likeness)
        return
    others = [each for each in facts.further if _is_far(each)] if suffers else []
    if others:
        yield _unlike(facts, others[0], "further inputs", "warning")
        return
    yield Holds(f"{likeness.samples} samples, {likeness.shift:.2g} deviations apart, {likeness.ratio:.3g} as wide")


def _is_far(likeness: Likeness) -> bool:
    return likeness.shift > max(FAR, CERTAIN * likeness.noise) or not 1 / FAR < likeness.ratio < FAR


def _unlike(facts: EvaluationFacts, likeness: Likeness, what: str, severity: Severity) -> Finding:
    return finding(
        "law.data.evaluation_is_alike",
        severity,
        max(1, facts.after),
        symptom=f"the {what} of the evaluation are others than those of training: of the median feature the means are "
        f"{likeness.shift:.3g} deviations apart, and it varies {likeness.ratio:.3g} times as much",
        cause="training and evaluation prepare their data differently: another normalisation or none, other units, "
        "statistics along another axis",
        remedy="prepare both by one function, with the statistics of the training data",
        sure=0.75,
        stage="input",
        evidence=[
            ("distance of the means, in deviations of the training inputs", round(likeness.shift, 3), 0.0),
            ("deviation in the evaluation over that in training", round(likeness.ratio, 4), 1.0),
        ],
    )


def _partly_unlike(facts: EvaluationFacts, likeness: Likeness) -> Finding:
    return finding(
        "law.data.evaluation_is_alike",
        "warning",
        max(1, facts.after),
        symptom="a part of the inputs of the evaluation are others than those of training: of a tenth of the features "
        f"the means are {likeness.part_shift:.3g} deviations apart or more, and its loss is far larger",
        cause="some features are prepared differently in training and evaluation: a part is normalised with the "
        "statistics of another, or not at all",
        remedy="prepare both by one function, with the same statistics",
        sure=0.7,
        stage="input",
        evidence=[
            ("distance of the means of the tenth that is farthest, in deviations", round(likeness.part_shift, 3), 0.0)
        ],
    )


def _cropped(facts: EvaluationFacts, likeness: Likeness) -> Finding:
    return finding(
        "law.data.evaluation_is_alike",
        "warning",
        max(1, facts.after),
        symptom=f"each picture of training has the shape {list(likeness.trained)}, and each of the evaluation "
        f"{list(likeness.evaluated)}",
        cause="one of both is cut at a bound that is off by one, in augmentation perhaps",
        remedy="cut or pad all pictures to one size",
        sure=0.8,
        stage="input",
        evidence=[("shape of a row, in the evaluation and in training", likeness.evaluated, likeness.trained)],
    )


def _suffers(case: Case, facts: EvaluationFacts) -> bool | None:
    """Whether the evaluation is clearly worse than training is at the time; None where that cannot be told."""
    losses = [each.loss for each in case.watched if each.step <= max(1, facts.after) and math.isfinite(each.loss)][-16:]
    if len(losses) < ENOUGH or min(losses) <= 0.0 or not facts.losses:
        return None
    return min(facts.losses) > WORSE * sum(losses) / len(losses)


def _cut(facts: EvaluationFacts, severity: Severity) -> Finding:
    return finding(
        "law.data.evaluation_is_alike",
        severity,
        max(1, facts.after),
        symptom="the inputs of training are whole numbers, and those of the evaluation are not",
        cause="the data of training were cast to integers, or rounded, on their way",
        remedy="cast data to a floating dtype, and prepare both by one function",
        sure=0.8,
        stage="input",
        evidence=[("values of training that are no whole numbers", 0)],
    )


def evaluation_is_the_same(case: Case) -> Iterator[Verdict]:
    """Every evaluation reads the same rows."""
    facts = case.newest(RowsFacts)
    if facts is None or len(facts.evaluations) < 2:
        return
    before, last = facts.evaluations[-2:]
    if before.digest == last.digest:
        yield Holds(f"{len(facts.evaluations)} evaluations of {last.rows} rows")
        return
    if _is_turned(facts):
        yield _turned(facts, last)
        return
    yield finding(
        "law.data.evaluation_is_the_same",
        "info",
        facts.steps,
        symptom=f"evaluations read other rows each time: {before.rows} after step {before.step}, {last.rows} after "
        f"step {last.step}",
        cause="the evaluation takes a random part of the data, or its data change; fine if that is intended",
        remedy="evaluate the same rows each time, so that the numbers can be compared",
        sure=0.5,
        stage="input",
        evidence=[("rows of the last evaluations", [each.rows for each in facts.evaluations])],
    )


def _is_turned(facts: RowsFacts) -> bool:
    """Whether hardly a row of an evaluation ever comes again, while those of training come again to the last bit."""
    last = facts.evaluations[-2:]
    is_new = (
        len(facts.evaluations) > TWICE and len({each.rows for each in last}) == 1 and not any(e.again for e in last)
    )
    comes_again = facts.new_lately == 0.0 and facts.rows >= 2 * facts.distinct
    return is_new and facts.is_continuous and comes_again and facts.are_changed


def _turned(facts: RowsFacts, last: EvaluatedRows) -> Finding:
    return finding(
        "law.data.evaluation_is_the_same",
        "warning",
        facts.steps,
        symptom=f"the {last.rows} rows of an evaluation are others each time, and the "
        f"{facts.distinct} rows of training come again to the last bit",
        cause="augmentation or noise is on in the evaluation, and off in training",
        remedy="give the random transformations to the data of training",
        sure=0.75,
        stage="input",
        evidence=[("rows that an evaluation before had read", last.again, last.rows)],
    )


def evaluated_batches_are_used(case: Case) -> Iterator[Verdict]:
    """A model is called for each batch of a pass in which it is evaluated."""
    facts = case.newest(DrawsFacts)
    if facts is None or not facts.passes:
        return
    if facts.passes_with_fewer < TWICE or 2 * facts.passes_with_fewer < facts.passes:
        yield Holds(f"{facts.passes} passes over data")
        return
    yield finding(
        "law.data.evaluated_batches_are_used",
        "warning",
        case.last_step,
        symptom=f"an evaluation goes over {facts.batches} batches and calls the model {facts.calls} times, in "
        f"{facts.passes_with_fewer} passes",
        cause="the outputs of one batch are used for others too: what each round makes anew is made once",
        remedy="call the model with each batch",
        sure=0.8,
        stage="loop",
        evidence=[("calls of the model in the last such pass", facts.calls, facts.batches)],
    )


def evaluation_goes_on(case: Case) -> Iterator[Verdict]:
    """A run that evaluates on its way goes on to do so."""
    facts = case.newest(RowsFacts)
    if not case.finished or facts is None or not facts.num_evaluations:
        return
    if facts.evaluated_at > facts.steps / 3 or facts.evaluated_at < EARLY or facts.steps < LONG:
        yield Holds(f"{facts.num_evaluations} evaluations, the last after step {facts.evaluated_at}")
        return
    if facts.is_between:
        yield NotApplicable(f"the pass after step {facts.evaluated_at} stands between two loops of the program")
        return
    yield finding(
        "law.data.evaluation_goes_on",
        "warning",
        facts.steps,
        symptom=f"the model was evaluated {facts.num_evaluations} times up to step {facts.evaluated_at}, and not "
        f"since, in {facts.steps} steps",
        cause="the evaluation is skipped from then on, or its data are used up: an iterator or generator is empty",
        remedy="evaluate after each epoch, with a loader in place of an iterator",
        sure=0.7,
        since_step=facts.evaluated_at,
        evidence=[("step of the last evaluation", facts.evaluated_at, facts.steps)],
    )
