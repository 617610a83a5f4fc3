"""What the recorder could not see of a loop, reported once, so that no finding is not taken for no fault."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sized
from typing import NamedTuple

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, OldCheck, finding

_NO_STEP = {
    "": "neither the model nor the optimizer that the watch was given was used, or not in the thread of the watch",
    "other_step": "an optimizer stepped that the watch was not given, and the one that it was given never did",
    "forward": "the model was called, and neither backward nor a step of the optimizer was seen",
    "autograd_grad": "gradients were computed by torch.autograd.grad, and the optimizer never stepped",
    "backward": "backward() was seen, and no step of the optimizer",
}
"""What a loop without a single step lacks, by the last event in this order that it had."""
_GIVE = "pass the watch the module that the loop calls and every optimizer that steps"
_NONE = "none is needed: only what is found by running a step again is not looked for"
_ELSEWHERE = "the loss is not made of what the watched model returned"


class _Blank(NamedTuple):
    """What was not seen, in how many steps, and what would show it."""

    what: str
    seen: str
    remedy: str


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
            symptom="not all of this loop can be seen: " + "; ".join(blank.what for blank in blanks),
            cause="the watch sees the models and optimizers that it is given, in the thread in which it is entered",
            remedy="; ".join(dict.fromkeys(blank.remedy for blank in blanks)),
            sure=1.0,
            stage="loop",
            evidence=[(blank.what, blank.seen) for blank in blanks],
        )


def _blanks(case: Case) -> Iterator[_Blank]:
    limits = case.facts("limits")
    for failure in limits.get("failures", ()):
        yield _Blank(f"a part of the watch has failed ({failure})", "it is switched off", "report it with this message")
    if limits.get("refused_bytes"):
        state, budget = limits["refused_bytes"] / 2**20, limits["budget_bytes"] / 2**20
        yield _Blank(
            f"no step can be replayed: a state is larger than memory_bytes={limits['budget_bytes']}",
            f"{state:.1f} MiB of {budget:.1f} MiB",
            f"memory_bytes={limits['refused_bytes']} or more, where there is room",
        )
    if not case.watched and case.finished:
        heard = set(case.facts("unfinished").get("events", ()))
        lacks = [what for kind, what in _NO_STEP.items() if not kind or kind in heard][-1]
        yield _Blank(lacks, "in the whole run", f"{_GIVE}, in the thread of the loop")
    last = case.watched[-8:]
    if len(last) < 3 and not case.finished:
        return
    reasons = Counter(str(each.values["blind"]) for each in last if each.values.get("blind"))
    without_loss = [each for each in last if each.values.get("losses") == [] and math.isnan(each.loss)]
    by_hand = [each for each in last if each.values.get("edited")]
    others = [each for each in last if any(kind == "other_step" and shared for kind, shared in each.events)]
    for reason, count in reasons.items():
        if 2 * count >= len(last):
            remedy = _GIVE if reason == _ELSEWHERE else _NONE
            yield _Blank(f"its steps cannot be replayed: {reason}", _of(count, last), remedy)
    for seen, what, remedy in (
        (without_loss, "no loss was seen", _GIVE),
        (by_hand, "gradients are changed by hand before the update, and a replay leaves that out", _NONE),
        (others, "an optimizer that the watch was not given steps parameters of the model", _GIVE),
    ):
        if last and 2 * len(seen) >= len(last):
            yield _Blank(what, _of(len(seen), last), remedy)


def _of(count: int, last: Sized) -> str:
    return f"{count} of the last {len(last)} steps"


NAMES: tuple[OldCheck, ...] = (unseen,)
