"""Laws of averages, as pure functions of a Case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from trainwright.doctor.averages.facts import CopiesFacts, CopyFacts, Move
from trainwright.doctor.case import Case
from trainwright.doctor.finding import Finding, OldCheck, Severity, finding, listed
from trainwright.doctor.law import Holds, Law, NotApplicable, Verdict
from trainwright.runlog.records import Where

EXPLAINED = 0.05
"""Of a move: what is left to the rounding of a float32 copy, a few digits of a small difference."""
MOVES = 3
"""So many moves tell an average from a copy that is made now and then."""

LEFT = 0.5
"""Of an average: more than that of the first weights, and it is rather these than what was trained."""
STEADY = 0.01
"""Of a share: a decay that warms up changes by more."""
TWICE, SELDOM = 2, 4
"""An evaluation comes twice at least; a teacher is called at more than every fourth step."""


def _copies(case: Case) -> tuple[int, Sequence[CopyFacts]]:
    facts = case.newest(CopiesFacts)
    return (facts.steps, facts.copies) if facts else (0, ())


def _averages(copies: Sequence[CopyFacts]) -> list[CopyFacts]:
    """Those that follow the weights in steps that are no whole copies."""
    return [each for each in copies if len(each.moves) >= MOVES and not any(_is_copy(move) for move in each.moves)]


def _is_copy(move: Move) -> bool:
    return abs(move.share - 1) < 1e-3 and move.rest_alone < EXPLAINED


def weights_follow(case: Case) -> Iterator[Verdict]:
    """What follows the weights is an average of them: of each step it takes a share between 0 and 1, and no more."""
    steps, copies = _copies(case)
    averages = [each for each in _averages(copies) if all(move.rest < EXPLAINED for move in each.moves)]
    if not averages:
        if steps:
            yield NotApplicable(f"none of {len(copies)} copies of the weights follows them")
        return
    for each in averages:
        yield _judged(case, steps, each)


def _judged(case: Case, steps: int, copy: CopyFacts) -> Verdict:
    last = copy.moves[-1]
    shares = [move.share for move in copy.moves]
    if all(move.rest_alone > 10 * move.rest + 1e-3 for move in copy.moves):
        what = f"are multiplied by {1 + last.growth:.4g} at each step beside what they take of the weights"
        return _broken(
            case, copy, "warning", what, "the two factors of the average do not add up to 1", last.growth, 0.0
        )
    if any(move.rest_alone > EXPLAINED for move in copy.moves):
        return NotApplicable(f"a {copy.kind} moves with the weights of {copy.of}, and is no average of them")
    if min(shares) < 0 or max(shares) > 1:
        what = f"take {last.share:.4g} of the way to the weights at each step"
        return _broken(case, copy, "warning", what, "its decay is not between 0 and 1", last.share, "0..1")
    if min(shares) > 0.5 and all(b.step - a.step > 1 for a, b in pairwise(copy.moves)):
        return NotApplicable(f"a {copy.kind} moves now and then, as a target or slow weights do")
    if min(shares) > 0.5 and not shares[-1] < 0.95 * shares[0]:
        what = f"take {last.share:.0%} of the way to the weights at each step, so it averages fewer than two steps"
        return _broken(
            case, copy, "warning", what, "its decay is the share of the new weights, or far too low", last.share, "<0.5"
        )
    return Holds(f"a {copy.kind} takes {last.share:.4g} of {copy.of} at {len(copy.moves)} of {steps} steps")


def _broken(
    case: Case, copy: CopyFacts, severity: Severity, what: str, cause: str, seen: float, expected: float | str
) -> Finding:
    return finding(
        "law.averages.weights_follow",
        severity,
        case.last_step,
        symptom=f"the averages of the weights of {copy.of} (a {copy.kind}) {what}",
        cause=cause,
        remedy="average = decay * average + (1 - decay) * weights, with a decay such as 0.99",
        sure=0.9,
        stage="update",
        since_step=copy.moves[0].step,
        evidence=[
            ("share of the way to the weights", [move.share for move in copy.moves[-4:]]),
            ("found", seen, expected),
        ],
    )


def parts_go_along(case: Case) -> Iterator[Verdict]:
    """Where some parts of an average move, all do: every weight by the same share, and the buffers too."""
    steps, copies = _copies(case)
    averages = [a for a in _averages(copies) if all(max(move.rests) < EXPLAINED for move in a.moves)]
    if not averages:
        if steps:
            yield NotApplicable("there is no average of the weights")
        return
    for each in averages:
        uneven = [n for n, name in enumerate(each.names) if all(_is_uneven(move, n) for move in each.moves)]
        left = [*each.still, *(each.names[n] for n in uneven if each.names[n] not in each.still)]
        if not left and not each.still_buffers:
            yield Holds(f"{len(each.names)} tensors of a {each.kind}")
            continue
        yield _left_behind(case, each, left or each.still_buffers, "weights" if left else "buffers")


def _is_uneven(move: Move, tensor: int) -> bool:
    usual = sorted(move.shares)[len(move.shares) // 2]
    return abs(move.shares[tensor] - usual) > 0.1 * abs(usual)


def _left_behind(case: Case, copy: CopyFacts, names: Sequence[str], what: str) -> Finding:
    return finding(
        "law.averages.parts_go_along",
        "warning",
        case.last_step,
        symptom=f"some {what} of an average of {copy.of} (a {copy.kind}) do not go along: {listed(names)}",
        cause="the loop that updates the average leaves them out"
        if what == "weights"
        else "parameters() has no running statistics: those of the average are from its begin",
        remedy="go over state_dict() of both, or copy the buffers beside the average of the weights",
        sure=0.85,
        stage="update",
        since_step=copy.moves[0].step,
        evidence=[("tensors that do not move while their originals do", list(names), [])],
    )


def evaluated_copies_move(case: Case) -> Iterator[Verdict]:
    """A copy of the weights that is evaluated in place of the model moves with it."""
    facts = case.newest(CopiesFacts)
    if facts is None:
        return
    called = [each for each in facts.copies if each.evaluations >= TWICE]
    stale = [each for each in called if not each.has_moved and SELDOM * each.evaluations <= facts.since]
    if not called:
        yield NotApplicable("no copy of the weights is evaluated")
        return
    if not stale or facts.own_evaluations or any(each.has_moved for each in called):
        yield Holds(f"{len(called)} copies of the weights")
        return
    copy = stale[0]
    yield finding(
        "law.averages.evaluated_copies_move",
        "warning",
        case.last_step,
        symptom=f"a {copy.kind} with the shapes of {copy.of} was evaluated {copy.evaluations} times, and its weights "
        f"did not change in {facts.since} steps",
        cause="the average that is evaluated is never updated, or is a copy from before the training",
        remedy="update the average after every step, from the weights of the model into those of the average",
        sure=0.9,
        stage="update",
        evidence=[("evaluations of the model itself", facts.own_evaluations, copy.evaluations)],
    )


def begin_is_forgotten(case: Case) -> Iterator[Verdict]:
    """At the end of a run an average that is evaluated is made of what was trained, and not of the first weights."""
    facts = case.newest(CopiesFacts)
    if facts is None or not case.finished:
        return
    called = [a for a in _averages(facts.copies) if a.evaluations and SELDOM * a.evaluations <= facts.since]
    steady = [a for a in called if _is_steady([move.share for move in a.moves])]
    if not steady:
        yield NotApplicable("no average with a steady decay is evaluated")
        return
    for each in steady:
        share = each.moves[-1].share
        left = (1.0 - share) ** case.last_step
        if left <= LEFT:
            yield Holds(f"{left:.2g} of a {each.kind} is left of the first weights")
            continue
        yield finding(
            "law.averages.begin_is_forgotten",
            "warning",
            case.last_step,
            symptom=f"{left:.0%} of the average of {each.of} (a {each.kind}) are the weights of its begin: it takes "
            f"{share:.3g} of the way at each of {case.last_step} steps",
            cause="its decay is made for a longer run",
            remedy=f"a decay of {1 - 20 / case.last_step:.4g}, one that warms up, or an average that begins later",
            sure=0.8,
            stage="update",
            since_step=each.moves[0].step,
            evidence=[("share of the first weights", round(left, 4), f"<= {LEFT}")],
        )


def _is_steady(shares: Sequence[float]) -> bool:
    return min(shares) > 0.0 and max(shares) - min(shares) <= STEADY * max(shares)


def used_statistics_are_measured(case: Case) -> Iterator[Verdict]:
    """Running statistics that training normalises with were measured at some time."""
    rows = case.facts("modes").get("eval", ())
    used = [each for each in rows if each["norm"] and each["depends"]]
    fresh = [each for each in used if each.get("fresh") and each["trained"]]
    if not fresh:
        if case.facts("modes"):
            yield Holds(f"{len(used)} layers") if used else NotApplicable("no training step uses running statistics")
        return
    names = [each["module"] for each in fresh]
    yield finding(
        "law.averages.used_statistics_are_measured",
        "warning",
        case.last_step,
        symptom=f"{listed(names)} normalises in eval mode since step {fresh[0]['since']}, with running statistics that "
        "are still 0 and 1",
        cause="the model trains in eval mode, and never did otherwise: nothing is normalised",
        remedy="call model.train() before each epoch; load the statistics along with the weights",
        sure=0.85,
        stage="forward",
        since_step=fresh[0]["since"],
        where=Where(module=names[0], source=fresh[0].get("source")),
        evidence=[("layers that have measured nothing", names[:8], [])],
    )


LAWS: tuple[Law, ...] = (
    Law("averages.evaluated_copies_move", evaluated_copies_move),
    Law("averages.weights_follow", weights_follow),
    Law("averages.parts_go_along", parts_go_along),
    Law("averages.begin_is_forgotten", begin_is_forgotten),
    Law("averages.used_statistics_are_measured", used_statistics_are_measured, named_by=("mode.*",)),
)
NAMES: tuple[OldCheck, ...] = ()
