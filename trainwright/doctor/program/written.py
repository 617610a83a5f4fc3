"""Laws of what the source shows: what is made is read, sums are made where their terms are, a best value is the best,
and arguments are given in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainwright.doctor.case import Case
from trainwright.doctor.finding import Finding, finding, listed
from trainwright.doctor.law import Holds, Verdict
from trainwright.doctor.program.facts import (
    BestsFacts,
    BrokenBest,
    ExchangedArguments,
    FollowedBest,
    MisplacedSum,
    UnreadValue,
    WrittenFacts,
)
from trainwright.runlog.records import Where

TWICE = 2
"""Evaluations: behind the first of them a best value may not have been set yet."""
_UNREAD = {
    "sum": ("is added up, and nothing reads it", "the line that used it is gone, or uses another name"),
    "list": ("grows, and nothing reads it", "it is left over, or the line that used it is gone"),
    "counted": ("grows, and a function returns its length and nothing of what is in it", "its sum was meant"),
    "value": ("is computed, and nothing reads it", "the line that used it is gone, or uses another name"),
    "told": ("is returned, and nothing reads it; another value is told under its name", "two names are exchanged"),
    "replaced": ("is computed, and replaced before anything reads it", "the second value was to be made of the first"),
    "part": ("is a part of the batch that nothing reads, as another loop over such batches does", "a part is left out"),
    "argument": ("is given to a function that does not read it", "the function uses another name or a fixed value"),
    "setting": ("is a number that the loop's function takes, and nothing reads it", "another name is in its place"),
    "outcome": ("is what a step of the environment returns, and nothing reads it", "rewards and ends go unheard"),
}
_MISPLACED = {
    "behind": ("is added to once, behind the loop whose rounds make what is added", "put the line into the loop"),
    "begun anew": ("is set back in each round of the loop that it is updated in", "put the line in front of the loop"),
    "never added to": ("is begun with other sums, divided in the end, and never added to", "add to it in the loop"),
    "never set": ("is 0 before the loop, is read behind it, and is set nowhere else", "set it in the loop"),
    "the same": ("gets the same as another sum of its dictionary", "add what belongs to its key"),
    "multiplied": ("is multiplied by another sum of its loop, or by the number of its terms", "divide by the count"),
    "shares": (
        "is a moving average whose two shares are not 1 together",
        "the share of the new value is 1 - the other",
    ),
    "twice": ("gets the same twice in a row", "leave one of the two lines out"),
}
_BESTS = {
    "never set": ("is infinite at the begin, and is never set to what beats it", "every value is taken for the best"),
    "never beaten": ("is infinite at the begin, and is compared so that nothing can beat it", "nothing is ever kept"),
    "set to another": ("is set to another value than the one that has beaten it", "it is compared with other values"),
    "set in each round": ("is set in each round, whether it was beaten or not", "it is no more than the last value"),
}


def values_are_read(case: Case) -> Iterator[Verdict]:
    """What the program makes of its model and its data, something reads."""
    facts = case.newest(WrittenFacts)
    if facts is None:
        return
    if not facts.unread:
        yield Holds(f"{facts.functions} functions of {facts.file}")
        return
    first: UnreadValue = min(facts.unread, key=lambda each: not each.is_missed)
    what, why = _UNREAD[first.kind]
    yield finding(
        "law.program.values_are_read",
        "warning" if first.is_missed else "info",
        max(1, case.last_step),
        symptom=f"{first.name} {what}",
        cause=why,
        remedy=f"use {first.name} where it is meant to be used, or delete the line",
        sure=0.75,
        stage="loop",
        where=Where(source=f"{first.file or facts.file}:{first.line}"),
        evidence=[("values that nothing reads", _listed(facts.unread), [])],
    )


def sums_are_made_in_their_loop(case: Case) -> Iterator[Verdict]:
    """What adds up over the rounds of a loop begins before it, and is added to within it, once a round."""
    facts = case.newest(WrittenFacts)
    if facts is None:
        return
    if not facts.misplaced:
        yield Holds(f"{facts.functions} functions of {facts.file}")
        return
    first: MisplacedSum = facts.misplaced[0]
    what, remedy = _MISPLACED[first.kind]
    yield finding(
        "law.program.sums_are_made_in_their_loop",
        "warning",
        max(1, case.last_step),
        symptom=f"{first.name} {what}",
        cause="a line stands in another block than it was written for, or is there twice",
        remedy=remedy,
        sure=0.85,
        stage="loop",
        where=Where(source=f"{first.file or facts.file}:{first.line}"),
        evidence=[("sums in the wrong place", _listed(facts.misplaced), [])],
    )


def bests_are_the_best(case: Case) -> Iterator[Verdict]:
    """The best value so far begins where every value beats it, and is set to what has beaten it."""
    facts = case.newest(WrittenFacts)
    if facts is None:
        return
    if not facts.bests:
        followed = case.newest(BestsFacts) if case.finished else None
        stands = [each for each in (() if followed is None else followed.bests) if (_stands(each) or _is_too_low(each))]
        yield _standing(case, stands[0]) if stands else Holds(f"{facts.functions} functions of {facts.file}")
        return
    first: BrokenBest = facts.bests[0]
    what, why = _BESTS[first.kind]
    yield finding(
        "law.program.bests_are_the_best",
        "warning",
        max(1, case.last_step),
        symptom=f"{first.name} {what}",
        cause=f"{why}: the line that sets it, or the condition in front of it, is gone or another",
        remedy=f"if value < {first.name}: {first.name} = value, from float('inf') on; or > from -float('inf') on",
        sure=0.85,
        stage="loop",
        where=Where(source=f"{first.file or facts.file}:{first.line}"),
        evidence=[
            ("best values that are not kept so", [f"{each.name} (line {each.line})" for each in facts.bests], [])
        ],
    )


def _stands(best: FollowedBest) -> bool:
    """Values that were compared with it are beyond it, and it has never moved."""
    return best.beaten >= TWICE and best.moved == 0


def _is_too_low(best: FollowedBest) -> bool:
    """It began at 0, and is to be beaten by what is lower, of values that all are above it."""
    return best.values >= TWICE and best.moved == 0 and best.begin == 0.0 and best.sign == "<" and best.low > 0.0


def _standing(case: Case, best: FollowedBest) -> Finding:
    is_beaten = _stands(best)
    what = f"{best.beaten} were beyond it" if is_beaten else "none was below it: nothing was ever kept"
    compared = f"{best.values} values of {best.value} were compared with it, from {best.low:.4g} to {best.high:.4g}"
    return finding(
        "law.program.bests_are_the_best",
        "warning",
        max(1, case.last_step),
        symptom=f"{best.name} is {best.now:.4g} since the begin; {compared}: {what}",
        cause="the line that sets it is gone, or is never reached"
        if is_beaten
        else "it begins at 0, as for what is to be high, and is compared as for what is to be low",
        remedy=f"if {best.value} {best.sign} {best.name}: {best.name} = {best.value}, from what any value beats on",
        sure=0.85,
        stage="loop",
        where=Where(source=best.line),
        evidence=[(f"values of {best.value} that were beyond it afterwards", best.beaten, 0)],
    )


def arguments_are_in_order(case: Case) -> Iterator[Verdict]:
    """No two arguments of a call have the names of each other's parameters."""
    facts = case.newest(WrittenFacts)
    if facts is None:
        return
    if not facts.exchanged:
        yield Holds(f"{facts.functions} functions of {facts.file}")
        return
    first: ExchangedArguments = facts.exchanged[0]
    (one, two), (to, other) = first.names, first.parameters
    yield finding(
        "law.program.arguments_are_in_order",
        "warning",
        max(1, case.last_step),
        symptom=f"{first.function} is given {one} as its {to} and {two} as its {other}",
        cause="two arguments have changed places",
        remedy=f"give {two} as {to} and {one} as {other}, or both by name",
        sure=0.8,
        stage="loop",
        where=Where(source=f"{first.file or facts.file}:{first.line}"),
        evidence=[("arguments, in their order", [one, two], [to, other])],
    )


def _listed(found: Sequence[UnreadValue | MisplacedSum]) -> str:
    return listed([f"{each.name} (line {each.line})" for each in found])
