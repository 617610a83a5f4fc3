"""Laws of how far updates go, and of how much further larger ones would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, RemedyTrial, finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.doctor.shared_loss import was_trained_before
from trainwright.doctor.vitals.facts import HigherRatesFacts, ReachFacts, VitalsFacts

FIRST, SECOND, APART = 40, 48, 8
"""Steps before the first measurement, before the second, and between any two that count."""
LONG = 128
"""Updates of a run that is no trial of a few, and steps after which even a long run is no more at its begin."""
TRIES = 4
"""Looks at which it may be impossible to measure."""
MUCH, PER_WAY = 0.02, 0.01
"""Of the loss: what is forgone at the least, by all that was done so far and by the last way of some 20 steps."""
BEYOND = 0.25
"""Of what the last way took off the loss: where three times as far takes off as much again, the lowest point of a
parabola lies beyond twice the way."""
FASTER = 2.5
"""Times what the last way took off: where three times as far takes off more than in proportion (2), the loss falls
faster and faster."""
STEADY = 0.5
"""Of the highest rate: below it the rate is in its warm-up or at its end."""
DOWN, EARLY = 0.1, 0.4
"""Of the highest rate: what it has come down to; and the share of the run's steps for which none but the end of a usual
schedule is so low: a cosine is for a fifth, a parabola for a third."""
RISES = 1.02
"""Times the rate at the begin of a way: with more at its end it is in its warm-up."""
STAIRS, CLIFF = 4, 0.3
"""Rises of a warm-up, and what is left of its highest rate at once where its top is a mistake."""
LATELY, CROSSINGS = 32, 4
"""Steps, and how often the loss goes through 0 in them, of one that is no longer falling through it."""
ENDLESS = "the loss is a difference of outputs, which has no minimum: it falls as far as one goes"


def way_is_used(case: Case) -> Iterator[Verdict]:
    """Three times the way of the last steps, straight on, lowers their loss by less than 1.5 times what the way did."""
    if case.last_step < FIRST:
        return
    if (why := _why_not(case)) is not None:
        yield NotApplicable(why)
        return
    known = [facts for _, facts in case.every(ReachFacts)]
    tried = case.outcomes(ReachFacts.experiment)
    last = known[-1] if known else None
    is_due = len(tried) < TRIES if last is None else _is_straight(last) and case.last_step >= SECOND
    if is_due and _is_steady(case, case.last_step) and (not tried or case.last_step >= tried[-1].step + APART):
        yield ExperimentRequest(ReachFacts.experiment)
    if last is None:
        yield NotApplicable(case.blind(ReachFacts) or "the learning rate was not near its highest value at a look")
        return
    counted = [each for each in known if _is_steady(case, each.until)]
    if len(counted) < 2 or not all(map(_is_straight, counted)):
        yield Holds(f"loss {last.before:.4g} before step {last.since}, {last.now:.4g} now, {last.beyond:.4g} beyond")
        return
    if any(each.endless for each in counted):
        yield NotApplicable(ENDLESS)
        return
    if _changes_sign(case):
        yield NotApplicable("the loss is above 0 in some steps and below it in others, as that of a policy")
        return
    first, last = counted[0], counted[-1]
    is_long = last.until >= LONG or (case.finished and _is_no_trial(case, last))
    is_clear = _has_no_end(last) and is_long
    rates = case.newest(HigherRatesFacts)
    if is_clear and rates is None and case.blind(HigherRatesFacts) is None:
        yield ExperimentRequest(HigherRatesFacts.experiment)
    lr = max(each.lr for each in case.watched if each.step <= last.until)
    yield finding(
        "law.vitals.way_is_used",
        "warning" if is_clear and rates is not None and rates.surely else "info",
        case.last_step,
        symptom=f"steps {last.since} to {last.until} took the loss of their batches from {last.before:.4g} to "
        f"{last.now:.4g}; three times as far in the same direction it is {last.beyond:.4g}",
        cause=f"the updates are several times too small, at a learning rate of {lr:.3g}: that rate, or what scales the "
        "loss, the gradients or the update" + ("; or the loss has no lower bound" if _has_no_end(last) else ""),
        remedy=f"three times the learning rate, {3 * lr:.3g}; look at factors, means and clips between the loss and "
        "the update",
        sure=0.75,
        stage="update",
        since_step=first.since,
        evidence=[
            ("loss three times as far", round(last.beyond, 6), f">= {1.5 * last.now - 0.5 * last.before:.6g}"),
            ("the same before", [round(each, 6) for each in (first.before, first.now, first.beyond)]),
        ],
        trial=RemedyTrial("other_lr", {"factor": 3.0, "recorded": True}),
    )


def higher_rates_gain_little(case: Case) -> Iterator[Verdict]:
    """Ten times the last rates would not have taken far more off the loss."""
    if not case.finished or case.last_step < FIRST:
        return
    if any(each.endless for _, each in case.every(ReachFacts)):
        yield NotApplicable(ENDLESS)
        return
    if _changes_sign(case):
        yield NotApplicable("the loss is above 0 in some steps and below it in others, as that of a policy")
        return
    is_early = _came_down_early(case)
    if not is_early and (first := _first(case)) is not None:
        yield first
        return
    facts = case.newest(HigherRatesFacts)
    if facts is None:
        why = case.blind(HigherRatesFacts)
        yield ExperimentRequest(HigherRatesFacts.experiment) if why is None else NotApplicable(why)
        return
    if (why := _why_not_paced(case, facts)) is not None:
        yield NotApplicable(why)
        return
    forgone = facts.as_it_was - facts.tenfold
    is_sure = facts.surely if is_early else facts.nearly_as
    if not (facts.fell and is_sure and forgone > PER_WAY * abs(facts.as_it_was)):
        yield Holds(f"loss {facts.before:.4g} to {facts.as_it_was:.4g}, at ten times the rate {facts.tenfold:.4g}")
        return
    lr = max(each.lr for each in case.watched if facts.since <= each.step <= facts.until)
    thrice, tenfold = (1.5, 2.0) if is_early else (2.0, 5.0)
    yield finding(
        "law.vitals.higher_rates_gain_little",
        "warning" if is_early and is_left_at_its_top([each.lr for each in case.watched]) else "info",
        case.last_step,
        symptom=f"steps {facts.since} to {facts.until} at a learning rate of {lr:.3g} take the loss of other batches "
        f"from {facts.before:.4g} to {facts.as_it_was:.4g}; at ten times that rate they take it to {facts.tenfold:.4g}",
        cause="the learning rate came down while the loss was still falling"
        if is_early
        else "the learning rate, or what scales the loss or the gradients, is far too small",
        remedy=f"a learning rate between {3 * lr:.3g} and {10 * lr:.3g} for as long as the loss falls",
        sure=0.75,
        stage="update",
        since_step=facts.since,
        evidence=[
            ("loss at three times the rate", round(facts.thrice, 6), f">= {_after(facts, thrice):.6g}"),
            ("loss at ten times the rate", round(facts.tenfold, 6), f">= {_after(facts, tenfold):.6g}"),
        ],
        trial=RemedyTrial("other_lr", {"factor": 3.0, "recorded": True}),
    )


def is_left_at_its_top(rates: Sequence[float]) -> bool:
    """Whether a warm-up rises step by step, and the rate falls from its top at once, for good: nobody warms up so."""
    peak = max(rates)
    top = rates.index(peak)
    rises = sum(later > earlier for earlier, later in pairwise(rates[: top + 1]))
    later = rates[top + 1 :]
    return STAIRS <= rises == top and len(later) > top and max(later) <= CLIFF * peak


def _changes_sign(case: Case) -> bool:
    """Whether the loss goes up and down through 0: what is relative to it, or below it, means nothing."""
    losses = [each.loss for each in case.watched[-LATELY:]]
    return sum((one < 0.0) != (other < 0.0) for one, other in pairwise(losses)) >= CROSSINGS


def _is_no_trial(case: Case, facts: ReachFacts) -> bool:
    """By the updates, where the optimizer counts them: those before a resume are among them, and skipped ones not."""
    later = case.last_step - facts.until
    return (facts.updates + later if facts.updates else case.last_step) >= LONG


def _came_down_early(case: Case) -> bool:
    """Whether the rate is and was near the end of its schedule for more of the run than schedules are."""
    highest = max((each.lr for each in case.watched), default=0.0)
    if highest <= 0.0:
        return False
    last_high = max(each.step for each in case.watched if each.lr > DOWN * highest)
    return case.last_step - last_high > EARLY * (case.last_step - case.watched[0].step + 1)


def _first(case: Case) -> ExperimentRequest | NotApplicable | None:
    """What comes before the steps are made again where the rate has not come down early; None: they may be."""
    rates = [each.lr for each in case.watched]
    if case.last_step < LONG or min(rates[-16:]) <= DOWN * max(rates):
        return NotApplicable("the learning rate has not come down early, and the run is short or at its schedule's end")
    if (why := _why_not(case)) is not None:
        return NotApplicable(why)
    tried, facts, lately = case.outcomes(ReachFacts.experiment), case.newest(ReachFacts), case.watched[-1].step - APART
    if not tried or tried[-1].step <= lately:
        return ExperimentRequest(ReachFacts.experiment)
    if facts is None or facts.until <= lately:
        return NotApplicable("the last steps cannot be run again")
    if facts.now - facts.beyond <= BEYOND * (facts.before - facts.now):
        return NotApplicable("three times the last way gains little")
    return None


def _after(facts: HigherRatesFacts, times: float) -> float:
    """The loss if so many times as much had been taken off it."""
    return facts.before - times * (facts.before - facts.as_it_was)


def _why_not_paced(case: Case, facts: HigherRatesFacts) -> str | None:
    """Why the law says nothing of this run."""
    if facts.drawn:
        return "the model learns from samples of its own"
    rates = [each.lr for each in case.watched if facts.since <= each.step <= facts.until]
    if not rates or rates[-1] > RISES * rates[0]:
        return "the learning rate rises"
    return _why_not(case, goes_on=facts.updates > case.last_step)


def _is_straight(facts: ReachFacts) -> bool:
    forgone = facts.now - facts.beyond
    return facts.surely and facts.before > facts.now and forgone > MUCH * abs(facts.now)


def _has_no_end(facts: ReachFacts) -> bool:
    """Whether the loss falls faster and faster, below 0. Any other may be one that is trained with care."""
    return facts.beyond < 0.0 and facts.now - facts.beyond >= FASTER * (facts.before - facts.now)


def _is_steady(case: Case, until: int) -> bool:
    """Whether the rate of the last 16 steps up to ``until`` was near its highest value: so far, and since then.

    A rate that has grown since (a hypergradient, a warm-up, a plan with restarts) is no longer that of the way.
    """
    rates = [(each.step, each.lr) for each in case.watched]
    lately = [lr for step, lr in rates if until - 16 < step <= until]
    return bool(lately) and min(lately) >= STEADY * max(lr for _, lr in rates) > 0.0


def _why_not(case: Case, *, goes_on: bool = False) -> str | None:
    """Why neither law says anything of this run; ``goes_on``: it was resumed with the state of its optimizer."""
    if (
        len({each["optimizer"] for kind, each in case.watched[-1].events if kind == "step"} if case.watched else ())
        != 1
    ):
        return "several optimizers play a game, in which no loss has to fall"
    vitals = case.newest(VitalsFacts)
    if vitals is not None and vitals.frozen_still:
        return "a part is frozen: what was trained before is trained on with care"
    return "the model was trained before" if not goes_on and was_trained_before(case) else None
