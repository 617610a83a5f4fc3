"""What of a loop could not be seen: said once, so that silence is not taken for health."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sized

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, check, finding

_NO_STEP = {
    "": "neither the model nor the optimizer that were given was used, or not in the thread of the watch",
    "other_step": "an optimizer stepped that was not given to the watch, and the one that was given never did",
    "forward": "the model was called, and neither backward nor a step of the optimizer was heard",
    "autograd_grad": "gradients were made by torch.autograd.grad, and the optimizer never stepped",
    "backward": "backward was heard, and never a step of the optimizer",
}
"""By the furthest that a loop without a single step has come."""


@check
def unseen(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """Facts about the recorder, no fault of the loop: so it is never more than an info.

    Where steps were seen it waits for three of them, and speaks of what holds for at least half of the last eight.
    """
    blank = list(_blanks(case))
    if blank:
        yield finding(
            "loop.unseen",
            "info",
            max(case.last_step, 1),
            symptom="not all of this loop can be seen: " + "; ".join(why for why, _ in blank),
            cause="the watch hears the models and optimizers that it is given, in the thread that it is entered in",
            remedy="give the watch the module that the loop calls and every optimizer that steps; nothing is wrong yet",
            sure=1.0,
            stage="loop",
            evidence=[(why, seen) for why, seen in blank],
        )


def _blanks(case: Case) -> Iterator[tuple[str, str]]:
    """What was not seen, and how often."""
    limits = case.about("limits")
    for failure in limits.get("failures", ()):
        yield f"a part of the watch has failed ({failure})", "it hears nothing any more"
    if limits.get("refused_bytes"):
        state, budget = limits["refused_bytes"] / 2**20, limits["budget_bytes"] / 2**20
        yield (
            f"no step can be run again: a state is larger than memory_bytes={limits['budget_bytes']}",
            (f"{state:.1f} MiB of {budget:.1f} MiB"),
        )
    if not case.watched and case.finished:
        heard = set(case.about("unfinished").get("events", ()))
        yield [why for kind, why in _NO_STEP.items() if not kind or kind in heard][-1], "in the whole run"
    last = case.watched[-8:]
    if len(last) < 3 and not case.finished:
        return
    reasons = Counter(str(each.values["blind"]) for each in last if each.values.get("blind"))
    silent = [each for each in last if each.values.get("losses") == [] and math.isnan(each.loss)]
    by_hand = [each for each in last if each.values.get("edited")]
    others = [each for each in last if any(kind == "other_step" and shared for kind, shared in each.events)]
    for reason, count in reasons.items():
        if 2 * count >= len(last):
            yield f"its steps cannot be run again: {reason}", _of(count, last)
    for seen, what in (
        (silent, "no loss was heard"),
        (by_hand, "gradients are changed by hand before the update, and a replay leaves that out"),
        (others, "an optimizer steps parameters of the model and was not given to the watch"),
    ):
        if last and 2 * len(seen) >= len(last):
            yield what, _of(len(seen), last)


def _of(count: int, last: Sized) -> str:
    return f"{count} of the last {len(last)} steps"
