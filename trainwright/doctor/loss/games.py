"""Laws of games, in which one model judges what another makes, and of losses that are made of derivatives."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.doctor.loss.facts import PlayersFacts, Rivalry, SlopesFacts

LATER = 4
"""Steps between two looks."""
ALL = 0.9
"""Of the way that all elements of an output would be pushed: nearly all are pushed to one side."""
ROUNDING = 1e-6


def players_are_at_odds(case: Case) -> Iterator[Verdict]:
    """A model that learns to tell data from what another makes is not helped by the other."""
    every = case.every(PlayersFacts)
    known = [each for _, facts in every for each in facts.rivalries if _tells_apart(each)]
    if not known:
        if every or case.blind(PlayersFacts) is not None:
            yield NotApplicable("no model learns to tell data from what another one makes")
        return
    helps = [each for each in known if each.of_made * each.by_maker > 0 and abs(each.by_maker) >= ALL]
    if len(helps) < len(known):
        yield Holds(f"model {known[-1].maker} pushes what model {known[-1].judge} says of it the other way")
        return
    if len(every) < 2:
        if case.last_step >= every[-1][0] + LATER or case.finished:
            yield ExperimentRequest(PlayersFacts.experiment)
        return
    seen = helps[-1]
    yield finding(
        "law.loss.players_are_at_odds",
        "warning",
        every[-1][0],
        symptom=f"model {seen.judge} learns to tell data from what model {seen.maker} makes, and the loss of model "
        f"{seen.maker} makes that easier: both push what is said of it the same way",
        cause="the loss of the maker has the targets, or the sign, of that of the judge",
        remedy="the maker wants its outputs to be taken for data: give its loss the targets of data",
        sure=0.85,
        stage="loss",
        since_step=every[0][0],
        evidence=[
            ("outputs for data are pushed by the judge", round(seen.of_data, 2)),
            ("outputs for what is made are pushed by the judge", round(seen.of_made, 2)),
            ("and by the maker", round(seen.by_maker, 2), f"{'below' if seen.of_made > 0 else 'above'} 0"),
        ],
    )


def _tells_apart(seen: Rivalry) -> bool:
    return seen.of_data * seen.of_made < 0 and min(abs(seen.of_data), abs(seen.of_made)) >= ALL


def judges_see_the_same(case: Case) -> Iterator[Verdict]:
    """What one model makes is given to another in the same way in the passes of both."""
    facts = case.newest(PlayersFacts)
    if facts is None or not facts.rivalries:
        if facts is not None or case.blind(PlayersFacts) is not None:
            yield NotApplicable("no model is given what another one makes in the passes of both")
        return
    apart = [each for each in facts.rivalries if each.apart]
    if not apart:
        yield Holds(f"{len(facts.rivalries)} models are given the same in the passes of both")
        return
    seen = apart[0]
    ways = [" and ".join(each) or "nothing" for each in (seen.done, seen.done_by_maker)]
    yield finding(
        "law.loss.judges_see_the_same",
        "warning",
        case.every(PlayersFacts)[-1][0],
        symptom=f"what model {seen.maker} makes reaches model {seen.judge} in one way where that learns and in another "
        f"where model {seen.maker} learns: they are {seen.apart:.2g} of its size apart",
        cause=f"between the two stands {ways[0]} in the first pass, and {ways[1]} in the second",
        remedy="give it to the other in the same way in both passes, but for detach()",
        sure=0.85,
        stage="forward",
        since_step=1,
        evidence=[("done on the way, where the judge learns", ways[0], ways[1])],
    )


def slopes_are_bounded(case: Case) -> Iterator[Verdict]:
    """A loss that is made of derivatives by inputs does not fall where these are far larger, of either sign."""
    facts = case.newest(SlopesFacts)
    if facts is None:
        if (why := case.blind(SlopesFacts)) is not None:
            yield NotApplicable(why)
        return
    # what depends on the sign of slopes, as a divergence does, is no penalty on their size
    known = [(a, max(b, c)) for a, b, c in zip(facts.before, facts.after, facts.turned) if math.isfinite(a)]
    bad = next(((a, b) for a, b in known if b < a - ROUNDING * abs(a)), None)
    if bad is None:
        yield Holds(", ".join(f"{a:.4g} to {b:.4g}" for a, b in known[:3]))
        return
    yield finding(
        "law.loss.slopes_are_bounded",
        "warning",
        case.last_step,
        symptom=f"the loss falls from {bad[0]:.4g} to {bad[1]:.4g} where the derivatives by the inputs, which it is "
        f"made of, are {facts.times:g} times as large",
        cause="a penalty on slopes has the wrong sign, or is divided by: it makes the function as steep as it can be",
        remedy="add a positive weight times a term that grows with the slopes",
        sure=0.85,
        stage="loss",
        since_step=1,
        evidence=[("loss with larger derivatives", bad[1], f">= {bad[0]:.6g}")],
    )
