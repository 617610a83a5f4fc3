"""Judges of the laws of ``laws.md``: pure functions of a Case."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, Measured, finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.doctor.loss.facts import (
    AtTargetsFacts,
    ComparedFacts,
    ComparisonsFacts,
    CutFacts,
    CutLoss,
    DividedTerm,
    Learned,
    SummedTerm,
    TowardsFacts,
    TowardsPass,
)
from trainwright.runlog.records import Where

NAMES = {"sub": "squared error", "rsub": "squared error", "__sub__": "squared error", "__rsub__": "squared error"}
ROUNDING = 1e-6
"""Of a loss, relative: a smaller change is none."""
FAR, MORE = 1.5, 0.5
"""Of the loss over classes of outputs of 0, so many times, and so much more: chance is not that bad."""
SOON, STAYS = 16, 0.9
"""The step at which it is looked at again; of the loss of chance, what it is below by then where scales do no harm."""
LITTLE = 0.25
"""Of the gradients of the rest: the weight of a penalty that is a sum may be chosen for the batch that there is."""
APART = 0.01
"""Of how far predictions that are wrong are from those that are right: by less, none is better."""
LATER = 8
"""Steps after which a model is no longer equal to the one that it is compared with."""


def starts_at_chance(case: Case) -> Iterator[Verdict]:
    """The first loss is not far above that of outputs of 0, which know nothing, or comes down within a few steps."""
    every = case.every(ComparisonsFacts)
    first = next((facts for step, facts in every if step == 1), None)
    if first is None:
        return
    known = [each for each in first.calls if each.blank > 0 and math.isfinite(each.value)]
    calls = [each for each in known if not each.made and not each.of_distances]
    implied = next((n for n, each in enumerate(first.implied) if each.value > FAR * each.blank + MORE), None)
    bad = [each for each in calls if _is_far_above(each)]
    if implied is None and not bad:
        if not calls and not first.implied:
            own = "the model makes its own targets, or scores are distances"
            yield NotApplicable(own if known else "no loss function that compares with targets")
            return
        rows = [(each.op, each.value, each.blank) for each in first.implied]
        rows += [(named(each), each.value, each.blank) for each in calls]
        yield Holds(", ".join(f"{name} {value:.3g} against {blank:.3g}" for name, value, blank in rows[:3]))
        return
    if every[-1][0] < SOON <= case.last_step:
        yield ExperimentRequest(ComparisonsFacts.experiment)
    elif every[-1][0] < SOON and not case.finished:
        yield NotApplicable("a few steps tell whether the loss stays far above chance")
    elif implied is not None:
        one = first.implied[implied]
        now = next((each.value for each in every[-1][1].implied[implied:]), one.value)
        yield _starts_far(one.op, (one.value, now), one.blank)
    else:
        worst = max(bad, key=lambda each: (_is_over_classes(each), each.value / each.blank))
        place = first.calls.index(worst)
        now = next((each.value for each in every[-1][1].calls[place:]), worst.value)
        of = (worst.value, now)
        yield _starts_far(named(worst), of, worst.blank, worst, [("targets", worst.targets)])


def _starts_far(
    name: str,
    values: tuple[float, float],
    blank: float,
    call: ComparedFacts | None = None,
    more: Sequence[Measured] = (),
) -> Finding:
    """``values``: at first, and when it was looked at last."""
    stays = not values[1] < STAYS * blank
    return finding(
        "law.loss.starts_at_chance",
        "warning" if stays and (call is None or _is_over_classes(call)) else "info",
        1,
        symptom=f"the first {name} is {values[0]:.4g}; outputs of 0 have {blank:.4g}",
        cause="the outputs are much too large before anything was learned: the scale of inputs, weights or outputs",
        remedy="standardise the inputs, use the usual initialisation, and look for a factor before the loss",
        sure=0.85,
        stage="forward",
        since_step=1,
        where=Where(op=name) if call is None else where_of(call),
        evidence=[(f"first {name}", values[0], blank), (f"{name} when it was looked at last", values[1]), *more],
    )


def _is_far_above(call: ComparedFacts) -> bool:
    """For classes as far as ``model.init_too_large`` asks for; else outputs of ten times the size of the targets."""
    if _is_over_classes(call):
        return call.value > FAR * call.blank + MORE
    return call.value > 100 * max(call.blank, call.constant)


def _is_over_classes(call: ComparedFacts) -> bool:
    return "entropy" in call.op or call.op == "nll_loss"


def named(call: ComparedFacts | Learned) -> str:
    return NAMES.get(call.op, call.op)


def where_of(call: ComparedFacts | Learned) -> Where:
    return Where(op=None if call.op in NAMES else call.op, module=call.module)


def targets_are_the_minimum(case: Case) -> Iterator[Verdict]:
    """The loss that backward is called on falls when predictions move towards their targets."""
    facts = case.newest(TowardsFacts)
    if facts is None:
        if (why := case.blind(TowardsFacts)) is not None:
            yield NotApplicable(why)
        return
    if not facts.ops or not math.isfinite(facts.before):
        yield NotApplicable("no loss function that compares with targets")
        return
    if facts.rivals and not facts.own:
        yield NotApplicable("one model may want the loss of the other to rise")
        return
    known = facts.own if facts.rivals else (TowardsPass(facts.before, facts.after),)
    bad = next((each for each in known if not _falls(each)), None)
    if bad is None:
        elsewhere = case.newest(AtTargetsFacts)
        if elsewhere is not None and _is_least_elsewhere(elsewhere):
            yield _least_elsewhere(case, elsewhere)
            return
        yield Holds(f"{', '.join(facts.ops)}: {known[0].before:.6g} to {known[0].after:.6g}")
        return
    rises = bad.after > bad.before + ROUNDING * abs(bad.before)
    if facts.maximises and rises:
        yield Holds(f"{', '.join(facts.ops)}: {bad.before:.6g} to {bad.after:.6g}, which the optimizer maximizes")
        return
    if facts.rivals and not rises:  # which comparisons are its own is not known
        yield NotApplicable("a loss does not depend on what is compared with targets")
        return
    if facts.reached and not rises:
        yield NotApplicable(f"beside a loss of {bad.before:.3g} the change is lost in rounding")
        return
    yield finding(
        "law.loss.targets_are_the_minimum",
        "warning",
        case.last_step,
        symptom=f"the loss {'rises' if rises else 'stays'} when all predictions move towards their targets: "
        f"{bad.before:.6g} to {bad.after:.6g}",
        cause=f"the sign of {facts.ops[0]} is turned, or another term grows faster"
        if rises
        else f"{facts.ops[0]} has no part in the value that backward() is called on: detached, or times zero",
        remedy="write the loss as a sum of what is to become small, each with a factor above 0",
        sure=0.85,
        stage="loss",
        where=Where(op=None if facts.ops[0] in NAMES else facts.ops[0]),
        evidence=[("loss with predictions nearer to their targets", bad.after, f"< {bad.before:.6g}")],
    )


def _falls(of: TowardsPass) -> bool:
    return of.after < of.before - ROUNDING * abs(of.before) or of.before == 0


def _is_least_elsewhere(facts: AtTargetsFacts) -> bool:
    return facts.elsewhere < facts.right - APART * abs(facts.most - facts.right)


def _least_elsewhere(case: Case, facts: AtTargetsFacts) -> Finding:
    return finding(
        "law.loss.targets_are_the_minimum",
        "warning",
        case.last_step,
        symptom=f"the terms {', '.join(facts.terms)} of the loss compare one prediction with the same targets, and "
        f"their sum is {facts.right:.4g} at the targets and less elsewhere: {facts.elsewhere:.4g} for {facts.what}",
        cause="one of the terms is least where another is not: its sign is turned, or a part of it is missing",
        remedy="write the loss as a sum of what is to become small, each with a factor above 0",
        sure=0.8,
        stage="loss",
        since_step=1,
        where=Where(op=facts.terms[-1]),
        evidence=[("sum of the terms at the targets, and elsewhere", facts.right, f"< {facts.elsewhere:.6g}")],
    )


def like_is_compared_with_like(case: Case) -> Iterator[Verdict]:
    """The prediction comes first and can reach its targets, and it is not compared with itself."""
    every = case.every(ComparisonsFacts)
    if not every:
        if (why := case.blind(ComparisonsFacts)) is not None:
            yield NotApplicable(why)
        elif case.newest("loss") is not None:
            yield ExperimentRequest(ComparisonsFacts.experiment)
        return
    calls = every[-1][1].calls
    if every[-1][1].added:
        yield _added(every[-1][0], every[-1][1].added)
        return
    if len(every) == 1 and any(map(_is_itself, calls)):  # a student that begins as its teacher
        if case.last_step >= every[0][0] + LATER:
            yield ExperimentRequest(ComparisonsFacts.experiment)
        return
    if not calls:
        yield NotApplicable("no loss function that compares with targets")
        return
    for call in calls:
        words = _unlike(call)
        if words is not None:
            symptom, cause, remedy = words
            yield finding(
                "law.loss.like_is_compared_with_like",
                "warning",
                every[-1][0],
                symptom=symptom,
                cause=cause,
                remedy=remedy,
                sure=0.85,
                stage="loss",
                where=where_of(call),
                evidence=[
                    ("share of targets out of reach", round(call.outside, 4), 0.0),
                    ("target has the graph", call.swapped, False),
                ],
            )
            return
    yield Holds(f"{len(calls)} calls: {', '.join(named(each) for each in calls)}")


def _added(step: int, op: str) -> Finding:
    return finding(
        "law.loss.like_is_compared_with_like",
        "warning",
        step,
        symptom=f"{op} gets the sum of an output and targets: it is smallest where the output is minus the target",
        cause="a plus stands where a minus is meant",
        remedy="take the difference of prediction and target",
        sure=0.85,
        stage="loss",
        where=Where(op=op),
        evidence=[("what the size is taken of", "output + targets", "output - targets")],
    )


def _is_itself(call: ComparedFacts) -> bool:
    return call.itself and call.value == 0


def _unlike(call: ComparedFacts) -> tuple[str, str, str] | None:
    """What is wrong with the arguments of a call: symptom, cause and remedy; None where nothing is."""
    if call.swapped:
        return (
            f"the second argument of {call.op} has a graph and the first has none",
            "prediction and target are swapped: the loss takes the prediction first",
            f"{call.op}(prediction, target)",
        )
    if _is_itself(call):
        return (
            f"prediction and target of {named(call)} have the same values, and the loss is 0",
            "the loss compares a thing with itself: one name stands for both, or the target was made of the output",
            "pass the targets of the batch",
        )
    if call.outside > 0.02:
        return (
            f"{call.outside:.0%} of the targets of {named(call)} lie beyond what {call.bound} can give",
            f"the prediction ends in {call.bound}, and targets have another range",
            f"leave out the {call.bound}, or bring the targets into its range",
        )
    return None


def batch_is_cut_anywhere(case: Case) -> Iterator[Verdict]:
    """A batch twice has the same loss as once, or every term of it twice as much."""
    compared = case.newest(ComparisonsFacts)
    if compared is not None and compared.summed is not None:
        yield _summed_among_means(case, compared.summed)
        return
    if compared is not None and compared.divided is not None:
        yield _divided_among_means(case, compared.divided)
        return
    if compared is not None and compared.rows:
        yield _added_to_rows(case, compared.rows)
        return
    facts = case.newest(CutFacts)
    if facts is None:
        if (why := case.blind(CutFacts)) is not None:
            yield NotApplicable(why)
        elif compared is not None:
            yield ExperimentRequest(CutFacts.experiment)
        return
    mixed = next((each for each in facts.losses if _kinds(each) == {"mean", "sum"} and not each.divides), None)
    first = facts.losses[0]
    if mixed is not None:
        summed = [each for each in mixed.terms if _kind(each.ratio) == "sum"]
        rest = sum(each.size for each in mixed.terms if each not in summed)
        yield finding(
            "law.loss.batch_is_cut_anywhere",
            "info" if sum(each.size for each in summed) < LITTLE * rest else "warning",
            case.last_step,
            symptom=f"{summed[0].name} is a sum over the samples and the rest of the loss is a mean over them",
            cause="the terms are reduced in two ways, so their balance depends on the size of the batch",
            remedy='give all terms the same reduction: "mean", or a sum divided by the number of samples',
            sure=0.75,
            stage="loss",
            where=Where(op=summed[0].name),
            evidence=[(f"{each.name} of the batch twice, over once", round(each.ratio, 3)) for each in mixed.terms],
        )
    elif _kinds(first) == {"sum"} and not first.divides:
        yield finding(
            "law.loss.batch_is_cut_anywhere",
            "info",
            case.last_step,
            symptom="the loss is a sum over the samples of a batch",
            cause='reduction="sum", or .sum(): the size of an update depends on that of the batch',
            remedy="divide by the number of samples, or choose the learning rate for this size",
            sure=0.8,
            stage="loss",
            evidence=[("loss of the batch twice, over once", round(first.ratio, 4), 1.0)],
        )
    elif all("neither" not in _kinds(each) for each in facts.losses):
        yield Holds(f"the loss of the batch twice is {first.ratio:.4g} of that once")
    else:
        yield NotApplicable(f"the loss relates samples to each other: of the batch twice it is {first.ratio:.4g} times")


def _kinds(loss: CutLoss) -> set[str]:
    return {_kind(each.ratio) for each in loss.terms} or {_kind(loss.ratio)}


def _summed_among_means(case: Case, term: SummedTerm) -> Finding:
    return finding(
        "law.loss.batch_is_cut_anywhere",
        "warning",
        case.last_step,
        symptom=f"{term.op} is a sum over {term.targets} targets, and another term of the loss is a mean over its own",
        cause="the terms are reduced in two ways, so one of them decides, and their balance depends on the batch",
        remedy='give all terms the same reduction: "mean", or a sum divided by the number of targets',
        sure=0.75,
        stage="loss",
        since_step=1,
        where=Where(op=term.op),
        evidence=[("targets that are summed over", term.targets, 1)],
    )


def _divided_among_means(case: Case, term: DividedTerm) -> Finding:
    return finding(
        "law.loss.batch_is_cut_anywhere",
        "warning",
        case.last_step,
        symptom=f"{term.op} is a mean and is divided by {term.samples}, the number of samples, again; another term of "
        "the loss is not",
        cause="a sum was meant where the mean is taken: the term shrinks with the size of the batch, beside the others",
        remedy='reduction="sum" before the division, or leave out the division',
        sure=0.75,
        stage="loss",
        since_step=1,
        where=Where(op=term.op),
        evidence=[("divided by", term.samples, 1)],
    )


def _added_to_rows(case: Case, rows: int) -> Finding:
    return finding(
        "law.loss.batch_is_cut_anywhere",
        "warning",
        case.last_step,
        symptom=f"a sum over the whole batch is added to {rows} numbers, one of each row",
        cause="a sum goes over the samples too, where its like are of one sample each: what a row gives depends on the "
        "others, and on how many there are",
        remedy="sum over all dimensions but that of the samples: dim=1, or flatten(1) first",
        sure=0.8,
        stage="loss",
        since_step=1,
        where=Where(op="sum"),
        evidence=[("rows that are summed over", rows, 1)],
    )


def _kind(ratio: float) -> str:
    return "mean" if abs(ratio - 1) < 1e-3 else "sum" if abs(ratio - 2) < 1e-3 else "neither"
