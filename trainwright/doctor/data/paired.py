"""The law of pairs: what an evaluation compares the outputs of a row with belongs to that row."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.data.facts import EvaluationFacts, PermutedFigure, RowsFacts
from trainwright.doctor.finding import Finding, finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.doctor.loss.facts import LearnedFacts
from trainwright.runlog.records import Where

SURELY = 3.0
"""Deviations over random orders of the rows: outputs that are further off than that know their own targets."""
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
