"""The judge of the law about the figures that a loop shows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from trainwright.doctor.case import Case
from trainwright.doctor.finding import finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.doctor.program.facts import Figure, FiguresFacts
from trainwright.runlog.json_values import Facts

LAST = 8
"""Steps whose losses tell whether something was learned."""
FAR = 20.0
"""How many times smaller than all losses of training no loss of an evaluation is. A sum of many is larger."""


def figures_are_possible(case: Case) -> Iterator[Verdict]:
    """What the loop calls a share of what is right is one, and a loss that it keeps is of the size of its losses."""
    facts = case.newest(FiguresFacts)
    if facts is None:
        return
    if not facts.figures:
        yield NotApplicable("no variable of the loop has the name of a figure")
        return
    losses = [each.loss for each in case.watched if each.loss == each.loss and abs(each.loss) != math.inf]
    for figure in facts.figures:
        why = (
            _impossible_share(case, figure, losses)
            if figure.kind == "share"
            else _impossible_loss(case, figure, losses)
        )
        if why is not None:
            yield finding(
                "law.program.figures_are_possible",
                "warning",
                case.last_step,
                symptom=f"{figure.name} is {figure.last:.4g}, {why}",
                cause="it is summed up, divided or averaged wrongly: counted twice, divided by another number than was "
                "summed up, a mean for a sum, a sign, or of other outputs and targets",
                remedy="compute it once by hand for a single batch",
                sure=0.8,
                since_step=figure.step,
                evidence=[
                    (figure.name, figure.last),
                    ("between", [figure.low, figure.high]),
                    ("losses of the steps between", [min(losses), max(losses)] if losses else None),
                ],
            )
            return
    yield Holds(", ".join(f"{each.name} {each.last:.4g}" for each in facts.figures[:4]))


def _impossible_share(case: Case, figure: Figure, losses: Sequence[float]) -> str | None:
    """Percentages are shares too, but for those below half of what guessing gets of several classes."""
    if figure.low < 0 or figure.high > 100:
        return "which is not between 0 and 1"
    classes = max((each["shape"][1] for each in case.facts("loss").get("given", ()) if _is_of_classes(each)), default=0)
    if classes >= 2 and figure.last > 1 and figure.high < 50 / classes:
        return f"more than 1, and as a percentage less than guessing gets of {classes} classes"
    has_learned = case.finished and len(losses) >= LAST and median(losses[-LAST:]) < 0.7 * math.log(max(2, classes))
    if classes >= 2 and "acc" in figure.name and figure.last < 0.5 / classes and has_learned:
        return f"less than guessing gets of {classes} classes, while the loss is below that of guessing"
    return None


def _is_of_classes(given: Facts) -> bool:
    return given["op"] in ("cross_entropy", "nll_loss") and len(given["shape"]) == 2


def _impossible_loss(case: Case, figure: Figure, losses: Sequence[float]) -> str | None:
    if len(losses) < 8 or not case.finished or min(losses) <= 0:
        return None
    if figure.low < 0:
        return "and no step had a loss below 0"
    if figure.last < min(losses) / FAR:
        return f"less than a {FAR:g}th of the least loss of any step"
    if figure.last > FAR**3 * max(losses):
        return f"more than {FAR**3:g} times the largest loss of any step"
    return None
