"""Laws of the direction of an update: it follows the gradients that are made, and the loss falls along it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Severity, finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.doctor.update.facts import RestoredFacts, UpdateFacts, module_of

RISES = 0.01
"""A cosine above it is no rounding: between gradient and update those of real loops are below -0.1, or above 0.1."""
FEW = 4
"""Losses at the begin, and at the end, that tell whether it has risen."""
LOOKS_TURNED, GAINED = 8, 0.05
"""At most so many looks are made again with the gradients of the backward passes; by this share, on the mean, the last
losses must be lower then.
"""


def unseen(case: Case) -> Iterator[Verdict]:
    """Why there are no looks at the update, where that is known."""
    if (why := case.blind(UpdateFacts)) is not None:
        yield NotApplicable(why)


def gradients_are_those_made(case: Case) -> Iterator[Verdict]:
    """The update uses the gradients that the recorded backward passes and the calls after them make."""
    looks = [
        (step, f) for step, f in case.every(UpdateFacts)
        if f.is_compared and f.has_same_loss and not f.written and not f.is_grafted
    ]  # fmt: skip
    if not looks:
        yield from unseen(case)
        return
    other = [(step, facts) for step, facts in looks if facts.regraded]
    if not other:
        yield Holds(f"{looks[-1][1].tensors} tensors at {len(looks)} steps")
        return
    step, facts = other[-1]
    names = [each.name for each in facts.regraded]
    first = facts.regraded[0]
    turned = [step for step, facts in other if facts.is_all_turned]
    yield from [ExperimentRequest(RestoredFacts.experiment, step) for step in turned[:LOOKS_TURNED]]
    restored = _if_restored(case)
    how, severity = _changed(facts, harms=_wants_to_fall(case) and (restored is not None or _rises(case)))
    losses = [("loss of some steps, and of the same steps with the gradients that are made", restored)]
    yield finding(
        "law.update.gradients_are_those_made",
        severity,
        step,
        symptom=f"{len(names)} gradients at the update are not those of the backward passes: they are {how}",
        cause="the loop changes them by hand" if facts.edited else "something that is no recorded call changes them",
        remedy="look at what comes between backward() and step(): .grad is written to, replaced or added to",
        sure=0.9,
        stage="backward",
        since_step=other[0][0],
        where=module_of(names),
        evidence=[
            ("steps with other gradients", f"{len(other)} of {len(looks)} that were compared", 0),
            (f"norm of the gradient of {names[0]}", first.live_norm, first.replayed_norm),
            *(losses if restored is not None else []),
        ],
    )


def _rises(case: Case) -> bool:
    """Whether the loss is higher at last than at first, noise included."""
    losses = [each.loss for each in case.watched if math.isfinite(each.loss)]
    return len(losses) >= 2 * FEW and min(losses[-FEW:]) > max(losses[:FEW])


def _if_restored(case: Case) -> list[float] | None:
    """The mean loss of a few steps, and of the same steps with the gradients of the backward passes, where that is
    lower in each and by far."""
    live = {each.step: each.loss for each in case.watched}
    for step, facts in case.every(RestoredFacts):
        restored = dict(zip(range(step, 0, -1), reversed(facts.losses)))
        pairs = [(live[each], restored[each]) for each in sorted(restored.keys() & live.keys())[-FEW:]]
        was, without = (statistics.fmean(each) for each in zip(*pairs)) if pairs else (0.0, 0.0)
        if len(pairs) == FEW and all(a > b for a, b in pairs) and was - without > GAINED * abs(without):
            return [was, without]
    return None


def _changed(facts: UpdateFacts, *, harms: bool) -> tuple[str, Severity]:
    """In what way gradients were changed, in words. To rewrite them is a technique; to turn their sign is a fault where
    it ``harms`` the loss.
    """
    tensors = facts.regraded
    known = [ratio for each in tensors if (ratio := each.ratio) is not None]
    if not known or max(known) == 0.0:
        if not any(each.live_norm > 0 for each in tensors):
            return "gone", "info"
        return "there where none was made", "info"
    if max(known) - min(known) > 1e-3 * max(known):
        return f"other by factors from {min(known):.3g} to {max(known):.3g}", "info"
    turned = all(each.is_turned for each in tensors)
    return f"{'-' if turned else ''}{known[0]:.4g} times as large", "warning" if turned and harms else "info"


def descends(case: Case) -> Iterator[Verdict]:
    """To first order the loss of the batch falls along the update."""
    looks = [(step, f) for step, f in case.every(UpdateFacts) if f.slopes and all(map(math.isfinite, f.slopes))]
    if not looks:
        yield from unseen(case)
        return
    rising = [(step, facts) for step, facts in looks if min(facts.slopes) > RISES]
    if looks[-1][1].maximises and not _wants_to_fall(case):
        yield NotApplicable("the optimizer is told to maximise")
        return
    if len(looks) < 3 or len(rising) < len(looks):
        yield Holds(f"cosine to the gradient {max(looks[-1][1].slopes):.2f} at {len(looks)} steps")
        return
    step, facts = rising[-1]
    yield finding(
        "law.update.descends",
        "critical" if _wants_to_fall(case) else "info",
        step,
        symptom=f"every update goes along the gradient, uphill: cosine {min(facts.slopes):.2f}",
        cause="a sign is turned between the loss and the weights: by maximize=True, a negated gradient, or the rule",
        remedy="look at maximize, at hooks and at what is done with .grad",
        sure=0.95,
        stage="update",
        since_step=rising[0][0],
        evidence=[("cosine between the gradient and the update", min(facts.slopes), "below 0")],
        explains=("opt.lr_too_high", "opt.lr_too_low", "sched.no_warmup"),
    )


def _wants_to_fall(case: Case) -> bool:
    """Whether the argument of backward is a loss that is bounded below and not above."""
    given = [each for exam in case.outcomes("loss") for each in exam.values.get("given", ())]
    return {each["wants"] for each in given if each.get("wants")} == {1}
