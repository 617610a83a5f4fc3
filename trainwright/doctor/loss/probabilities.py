"""Laws of losses over classes: of what they take, and of what they can become."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.data.facts import EvaluationFacts
from trainwright.doctor.finding import finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.doctor.loss.facts import ComparedFacts, ComparisonsFacts
from trainwright.runlog.records import Where

ROUNDED = 0.05
"""What bfloat16 (8 bits) leaves of a sum of some hundred probabilities is within that of 1."""

ROOM = 0.1
"""Of the loss of equal shares: label smoothing of a tenth leaves three quarters, of a half a quarter."""


def probabilities_add_up(case: Case) -> Iterator[Verdict]:
    """What an evaluation gives to nll_loss are logarithms of probabilities, which add up to 1 over the classes."""
    facts = case.newest(EvaluationFacts)
    if facts is None:
        return
    if facts.mass < 0.0:
        yield NotApplicable("no evaluation calls nll_loss")
    elif facts.mass <= ROUNDED:
        yield Holds(f"they add up to 1 within {facts.mass:.2g}")
    else:
        yield finding(
            "law.loss.probabilities_add_up",
            "warning",
            max(1, facts.after),
            symptom=f"what nll_loss is given in an evaluation are no logarithms of probabilities: over the classes of "
            f"a row these differ from 1 by {facts.mass:.3g}",
            cause="log_softmax is over another dimension than that of the classes, or its values are changed after it",
            remedy="log_softmax(outputs, dim=1) over the classes, right before nll_loss; or cross_entropy(outputs)",
            sure=0.85,
            stage="loss",
            where=Where(op="nll_loss", source=facts.mass_line),
            evidence=[("sum of the probabilities of a row, its median distance from 1", facts.mass, 0.0)],
        )


def there_is_room_to_learn(case: Case) -> Iterator[Verdict]:
    """The best prediction that there is has a loss well below that of equal shares."""
    facts = case.newest(ComparisonsFacts)
    if facts is None:
        return
    calls = [each for each in facts.calls if each.smoothed[1] > 0.0]
    if not calls:
        yield NotApplicable("no targets are smoothed")
        return
    worst = min(calls, key=_room)
    perfect, equal = worst.smoothed
    if _room(worst) > ROOM:
        yield Holds(f"{worst.op} can fall from {equal:.3g} to {perfect:.3g}")
        return
    yield finding(
        "law.loss.there_is_room_to_learn",
        "warning",
        case.last_step,
        symptom=f"a perfect prediction has a {worst.op} of {perfect:.4g}, one of equal shares {equal:.4g}",
        cause="the targets hardly tell one class from another: the share of label smoothing is far too large",
        remedy="label_smoothing near 0.1",
        sure=0.85,
        stage="loss",
        since_step=1,
        where=Where(op=worst.op, module=worst.module),
        evidence=[("share of the loss that can be learned", round(_room(worst), 4), f"> {ROOM}")],
    )


def _room(call: ComparedFacts) -> float:
    perfect, equal = call.smoothed
    return 1.0 - perfect / equal
