"""Laws of losses over classes: of what they take, and of what they can become."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import Finding, finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.doctor.loss.facts import ComparedFacts, ComparisonsFacts
from trainwright.doctor.loss.laws import where_of

ROUNDED = 0.05
"""What bfloat16 (8 bits) leaves of a sum of some hundred probabilities is within that of 1."""

ROOM = 0.1
"""Of the loss of equal shares: label smoothing of a tenth leaves three quarters, of a half a quarter."""
WITHIN = 0.75
"""Of the same, where logits are bounded: tanh over ten classes leaves two thirds, and gives no class more than 0.45."""


def probabilities_add_up(case: Case) -> Iterator[Verdict]:
    """What nll_loss is given are logarithms of probabilities, which add up to 1 over the classes."""
    compared = case.newest(ComparisonsFacts)
    if compared is None:
        return
    trained = [each for each in compared.calls if each.mass >= 0.0]
    off = [each for each in trained if each.mass > ROUNDED and not each.weighed]
    if off:
        yield _adds_up_to_another(case.last_step, off[0])
    elif any(each.weighed for each in trained):
        yield NotApplicable("the probabilities are weighed by themselves, or taken from 1")
    elif trained:
        yield Holds(f"they add up to 1 within {max(each.mass for each in trained):.2g}")
    else:
        yield NotApplicable("nothing calls nll_loss")


def _adds_up_to_another(step: int, call: ComparedFacts) -> Finding:
    return finding(
        "law.loss.probabilities_add_up",
        "warning",
        step,
        symptom="what nll_loss is given are no logarithms of probabilities: over the classes of a row these differ "
        f"from 1 by {call.mass:.3g}",
        cause="log_softmax is over another dimension than that of the classes, or its values are changed after it",
        remedy="log_softmax(outputs, dim=1) over the classes, right before nll_loss; or cross_entropy(outputs)",
        sure=0.85,
        stage="loss",
        where=where_of(call),
        evidence=[("sum of the probabilities of a row, its median distance from 1", call.mass, 0.0)],
    )


def there_is_room_to_learn(case: Case) -> Iterator[Verdict]:
    """The best prediction that there is has a loss well below that of equal shares."""
    facts = case.newest(ComparisonsFacts)
    if facts is None:
        return
    ends = [(each, *each.smoothed, ROOM) for each in facts.calls if each.smoothed[1] > 0.0]
    ends += [(each, *each.bounded, WITHIN) for each in facts.calls if each.bounded[1] > 0.0]
    if not ends:
        yield NotApplicable("no targets are smoothed, and no logits are bounded")
        return
    for call, perfect, equal, least in ends:
        if 1.0 - perfect / equal <= least:
            yield _no_room(case, call, perfect, equal, least)
            return
    call, perfect, equal, _ = ends[0]
    yield Holds(f"{call.op} can fall from {equal:.3g} to {perfect:.3g}")


def _no_room(case: Case, call: ComparedFacts, perfect: float, equal: float, least: float) -> Finding:
    is_bounded = (perfect, equal) == call.bounded
    return finding(
        "law.loss.there_is_room_to_learn",
        "warning",
        case.last_step,
        symptom=f"a perfect prediction has a {call.op} of {perfect:.4g}, one of equal shares {equal:.4g}",
        cause=f"the outputs end in {call.bound}, and {call.op} takes logits, which have no bounds"
        if is_bounded
        else "the targets hardly tell one class from another: the share of label smoothing is far too large",
        remedy=f"leave out the {call.bound} behind the last layer" if is_bounded else "label_smoothing near 0.1",
        sure=0.85,
        stage="loss",
        since_step=1,
        where=where_of(call),
        evidence=[("share of the loss that can be learned", round(1.0 - perfect / equal, 4), f"> {least}")],
    )
