"""Laws of what a figure of an evaluation is of: it does not grow with the number of rows, and is of more than one."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.data.facts import EvaluationFacts, KeptNumber, RowsFacts
from trainwright.doctor.finding import Finding, finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.doctor.program.facts import WrittenFacts
from trainwright.runlog.records import Where

OF_SUMS = ("total", "sum", "count", "num", "right", "correct", "hit", "found", "won", "win", "step", "len", "n")
"""What a part of the name of a number begins with that is told as a sum."""
TWICE = 2
"""Evaluations: the first may be of weights that give no number yet."""
SEVERAL = 8
"""Rows of a step of training: such a loop works with batches, and means one of its evaluation to have several too."""


def figures_do_not_grow(case: Case) -> Iterator[Verdict]:
    """A figure of twice as many rows is about the same."""
    facts, written = case.newest(EvaluationFacts), case.newest(WrittenFacts)
    if facts is None:
        return
    used = set() if written is None else set(written.worked_with)
    known = [each for each in facts.numbers if _root(each.name) not in used and not _is_named_as_sum(each.name)]
    sums = [each for each in known if each.is_sum and 1 < facts.most_rows <= each.elements]
    if sums:
        yield _grows(facts, sums[0])
    elif known:
        yield Holds(", ".join(f"{each.name} {each.value:.4g}" for each in known[:4]))
    else:
        yield NotApplicable("no number of the loop is known as made of what its evaluation computed")


def _grows(facts: EvaluationFacts, number: KeptNumber) -> Finding:
    average = number.value / number.elements
    return finding(
        "law.data.figures_do_not_grow",
        "warning",
        max(1, facts.after),
        symptom=f"{number.name} is {number.value:.4g}, the sum of {number.elements} values over the "
        f"{facts.most_rows} rows of an evaluation, and nothing divides it: their mean is {average:.4g}",
        cause="a sum in place of a mean: it is twice as large for twice as many rows",
        remedy="divide by the number of rows, or call what is meant as a sum a total",
        sure=0.75,
        stage="loop",
        where=Where(source=number.line),
        evidence=[(number.name, number.value, average)],
    )


def figures_are_numbers(case: Case) -> Iterator[Verdict]:
    """A figure of outputs that are numbers is one, too."""
    every = list({facts.after: facts for _, facts in case.every(EvaluationFacts)}.values())
    if not every:
        return
    if len(every) < TWICE or any(each.undefined is None for each in every[-TWICE:]):
        yield Holds(f"{len(every)} evaluations")
        return
    yield finding(
        "law.data.figures_are_numbers",
        "warning",
        max(1, every[-1].after),
        symptom="the number that the loop keeps of its evaluation is nan, and no output of the model is",
        cause="a root or a logarithm of what is below 0, or a mean over nothing: a sign, a scale or a mask is another "
        "than was meant",
        remedy="compute the figure step by step for one batch, and look where nan comes in",
        sure=0.85,
        stage="loop",
        where=Where(source=every[-1].undefined),
        evidence=[("evaluations in a row that give nan", TWICE, 0)],
    )


def evaluation_has_rows(case: Case) -> Iterator[Verdict]:
    """A figure is of more than one row: how far another row would be from it is not known."""
    facts, rows = case.newest(EvaluationFacts), case.newest(RowsFacts)
    if facts is None:
        return
    if facts.single is None:
        yield Holds(f"{facts.rows} rows")
    elif rows is None or rows.batch < SEVERAL:
        yield NotApplicable("training itself works with few rows at a time")
    else:
        yield _alone(facts, facts.single, rows.batch)


def _alone(facts: EvaluationFacts, value: float, batch: int) -> Finding:
    name = next((each.name for each in facts.numbers if each.value == value), "what is computed here")
    return finding(
        "law.data.evaluation_has_rows",
        "warning",
        max(1, facts.after),
        symptom=f"{name} is {value:.4g}, the mean over a single row; a step of training has {batch}",
        cause="the data of the evaluation were cut down, for a test perhaps, or are indexed where a part is meant",
        remedy="evaluate some hundred rows: the error of a mean falls with the root of their number",
        sure=0.75,
        stage="loop",
        where=Where(source=facts.single_line),
        evidence=[("rows of the figure", 1, batch)],
    )


def rows_are_decided_apart(case: Case) -> Iterator[Verdict]:
    """The outputs of a row decide about that row."""
    facts = case.newest(EvaluationFacts)
    if facts is None:
        return
    if not facts.at_once:
        yield Holds(f"{facts.rows} rows")
        return
    yield finding(
        "law.data.rows_are_decided_apart",
        "warning",
        max(1, facts.after),
        symptom=f"one decision is taken over all {facts.most_rows} rows of a batch and all of their columns, and a "
        f"number is made of it at {facts.at_once[0] or 'a line that is not known'}",
        cause="argmax without a dimension gives the place of the largest value of the whole batch",
        remedy="outputs.argmax(dim=-1), which decides for each row",
        sure=0.85,
        stage="loop",
        where=Where(source=facts.at_once[0] or None),
        evidence=[("decisions for the rows of a call", 1, facts.most_rows)],
    )


def _root(name: str) -> str:
    return name.partition(".")[0].partition("[")[0]


def _is_named_as_sum(name: str) -> bool:
    parts = name.lower().replace(".", "_").split("_")
    return any(part == each or (len(each) > 1 and part.startswith(each)) for part in parts for each in OF_SUMS)
