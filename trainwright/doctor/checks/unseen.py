"""What the recorder could not see of a loop, reported once, so that no finding is not taken for no fault."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sized

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, check, finding

_NO_STEP = {
    "": "neither the model nor the optimizer that the watch was given was used, or not in the thread of the watch",
    "other_step": "an optimizer stepped that the watch was not given, and the one that it was given never did",
    "forward": "the model was called, and neither backward nor a step of the optimizer was seen",
    "autograd_grad": "gradients were computed by torch.autograd.grad, and the optimizer never stepped",
    "backward": "backward() was seen, and no step of the optimizer",
}
"""What a loop without a single step lacks, by the last event in this order that it had."""


@check
def unseen(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """Reports what the recorder cannot see, which is no fault of the loop and never more than an info.

    Where there are steps it waits for three of them, and reports what holds for at least half of the last eight.
    """
    blanks = list(_blanks(case))
    if blanks:
        yield finding(
            "loop.unseen",
            "info",
            max(case.last_step, 1),
            symptom="not all of this loop can be seen: " + "; ".join(what for what, _ in blanks),
            cause="the watch sees the models and optimizers that it is given, in the thread in which it is entered",
            remedy="pass the watch the module that the loop calls and every optimizer that steps; this is no fault yet",
            sure=1.0,
            stage="loop",
            evidence=[(what, seen) for what, seen in blanks],
        )


def _blanks(case: Case) -> Iterator[tuple[str, str]]:
    """What was not seen, and in how many steps."""
    limits = case.facts("limits")
    for failure in limits.get("failures", ()):
        yield f"a part of the watch has failed ({failure})", "it is switched off"
    if limits.get("refused_bytes"):
        state, budget = limits["refused_bytes"] / 2**20, limits["budget_bytes"] / 2**20
        yield (
            f"no step can be replayed: a state is larger than memory_bytes={limits['budget_bytes']}",
            (f"{state:.1f} MiB of {budget:.1f} MiB"),
        )
    if not case.watched and case.finished:
        heard = set(case.facts("unfinished").get("events", ()))
        yield [what for kind, what in _NO_STEP.items() if not kind or kind in heard][-1], "in the whole run"
    last = case.watched[-8:]
    if len(last) < 3 and not case.finished:
        return
    reasons = Counter(str(each.values["blind"]) for each in last if each.values.get("blind"))
    without_loss = [each for each in last if each.values.get("losses") == [] and math.isnan(each.loss)]
    by_hand = [each for each in last if each.values.get("edited")]
    others = [each for each in last if any(kind == "other_step" and shared for kind, shared in each.events)]
    for reason, count in reasons.items():
        if 2 * count >= len(last):
            yield f"its steps cannot be replayed: {reason}", _of(count, last)
    for seen, what in (
        (without_loss, "no loss was seen"),
        (by_hand, "gradients are changed by hand before the update, and a replay leaves that out"),
        (others, "an optimizer that the watch was not given steps parameters of the model"),
    ):
        if last and 2 * len(seen) >= len(last):
            yield what, _of(len(seen), last)


def _of(count: int, last: Sized) -> str:
    return f"{count} of the last {len(last)} steps"
