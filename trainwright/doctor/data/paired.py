"""The law of pairs: what an evaluation compares the outputs of a row with belongs to that row."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.data.facts import DecidedFigure, EvaluationFacts, PermutedFigure, RowsFacts
from trainwright.doctor.data.perfect import counts_right
from trainwright.doctor.finding import Finding, finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.doctor.loss.facts import LearnedFacts
from trainwright.runlog.records import Where

SURELY = 3.0
"""Deviations over random orders of the rows: outputs that are further off than that know their own targets."""
CERTAIN, TWICE = 5.0, 2
"""Deviations that decisions must be worse than those of other rows; evaluations in which they must not matter."""
KNOWS, SHARE = 0.2, 0.1
"""Of the loss, by which it rises in training with shuffled targets; the share of that which is nothing."""
BESIDE = 10.0
"""Deviations by which a figure is better with outputs a row or two beside their own: neighbours are alike by less."""
LATE = 0.4
"""Of the run, before which a model may not know anything yet."""
BY_HEART = 8
"""Passes over the data after which a model may know its samples, and nothing of others."""
ROUNDED = 1e-6
"""Relative: sums in another order."""


def evaluated_rows_have_their_targets(case: Case) -> Iterator[Verdict]:
    """Where training knows which targets belong to which rows, an evaluation is worse with the rows in other orders."""
    facts, learned = case.newest(EvaluationFacts), case.newest(LearnedFacts)
    if facts is None or learned is None:
        return
    moving = [each for each in facts.permuted if each.deviation > ROUNDED * abs(each.others)]
    told = min((each.told - SURELY * each.told_error for each in learned.calls), default=0.0)
    if told < KNOWS or learned.drawn:
        yield NotApplicable("it does not matter in training which targets belong to which rows")
    elif not moving or facts.after < LATE * case.last_step:
        yield NotApplicable("no figure of a late evaluation depends on the order of the rows")
    elif any(map(_knows, moving)):
        first = next(filter(_knows, moving))
        yield Holds(f"{first.told:.4g} at {first.line}, and {first.others:.4g} with the rows in other orders")
    elif (blind := next((each for each in moving if _is_beside(each) or _knows_nothing(each, told)), None)) is not None:
        yield _of_other_rows(facts, blind, told, is_sure=_is_beside(blind) or not _is_known_by_heart(case))
    else:
        yield NotApplicable(f"too few rows: {facts.rows}")


def decisions_agree_with_the_loss(case: Case) -> Iterator[Verdict]:
    """Where the loss of an evaluation is lower for the targets of their own rows, more of its decisions are right."""
    every = [facts for _, facts in case.every(EvaluationFacts) if any(map(_is_low, facts.permuted))]
    if not every:
        yield NotApplicable("no loss of an evaluation is known to be lower for the targets of their own rows")
        return
    facts = every[-1]
    known = {(each.of, each.over): each for each in facts.decided if each.asks != "none"}
    decided = [each for each in facts.permuted if each.decided]
    turned = [each for each in decided if _is_turned(each, known.get((each.of, each.over)))]
    if turned:
        yield _disagrees(facts, turned[0], "as if what is wrong were right", "a sign, a comparison or a threshold")
    elif len({each.after for each in every}) >= TWICE and (blind := [each for each in decided if _is_blind(each)]):
        yield _disagrees(facts, blind[0], "whatever the targets of the loss are", "what decisions are compared with")
    elif decided:
        yield Holds(f"{decided[0].told:.4g} at {decided[0].line}, and {decided[0].others:.4g} of other rows")


def _is_low(figure: PermutedFigure) -> bool:
    return not figure.decided and figure.others - figure.told > SURELY * figure.deviation > 0.0


def _is_turned(figure: PermutedFigure, decided: DecidedFigure | None) -> bool:
    """Whether it is better for other rows: by what it would be for perfect predictions, or by its name."""
    is_right = counts_right(figure.sum_name)
    if decided is not None and decided.perfect != decided.wrong:
        is_right = decided.perfect > decided.wrong
    if is_right is None or figure.deviation <= ROUNDED * abs(figure.others):
        return False
    return (figure.told - figure.others) * (1 if is_right else -1) < -CERTAIN * figure.deviation


def _is_blind(figure: PermutedFigure) -> bool:
    return figure.is_blind and figure.told == figure.others and counts_right(figure.sum_name) is not None


def _disagrees(facts: EvaluationFacts, figure: PermutedFigure, how: str, what: str) -> Finding:
    low, name = next(filter(_is_low, facts.permuted)), figure.sum_name or "what is computed"
    return finding(
        "law.data.decisions_agree_with_the_loss",
        "warning",
        max(1, facts.after),
        symptom=f"{name} at {figure.line} is {figure.told:.4g}, and {figure.others:.4g} "
        f"with the outputs of other rows, {how}; the loss is {low.told:.4g}, and {low.others:.4g} with these",
        cause=f"{what} is another in the decisions than in the loss",
        remedy="compute the figure of the targets themselves in place of the decisions: it must be at its best",
        sure=0.8,
        stage="loop",
        where=Where(source=figure.line),
        evidence=[("decisions as they are, and of other rows", figure.told, figure.others)],
    )


def _knows(figure: PermutedFigure) -> bool:
    return abs(figure.told - figure.others) > SURELY * figure.deviation


def _knows_nothing(figure: PermutedFigure, told: float) -> bool:
    """Whether what it may gain by its order is nothing, beside what training gains."""
    most = abs(figure.told - figure.others) + 2 * figure.deviation
    return most < SHARE * min(1.0, told) * abs(figure.others)


def _is_beside(figure: PermutedFigure) -> bool:
    """Whether the targets are those of a row nearby."""
    return any(abs(each - figure.others) > BESIDE * figure.deviation for each in figure.nearby)


def _is_known_by_heart(case: Case) -> bool:
    rows = case.newest(RowsFacts)
    return rows is None or rows.rows > BY_HEART * max(1, rows.distinct)


def _of_other_rows(facts: EvaluationFacts, figure: PermutedFigure, told: float, *, is_sure: bool) -> Finding:
    return finding(
        "law.data.evaluated_rows_have_their_targets",
        "warning" if is_sure else "info",
        max(1, facts.after),
        symptom=f"what is computed at {figure.line or 'a line that is not known'} is {figure.told:.4g}, and with the "
        f"{facts.rows} rows of outputs in random orders {figure.others:.4g}, give or take {figure.deviation:.2g}; in "
        f"training the loss rises by {told:.0%} with shuffled targets",
        cause="outputs are compared with the targets of other rows: inputs and targets are cut, sorted or shuffled "
        "differently. Or nothing of what was learned holds beyond the training data",
        remedy="look at some rows of inputs and targets of the evaluation side by side; cut both by one index",
        sure=0.75 if is_sure else 0.5,
        stage="label",
        where=Where(source=figure.line),
        evidence=[
            ("figure as it is, and with rows in random orders", figure.told, figure.others),
            ("deviation over these orders", figure.deviation),
        ],
    )
