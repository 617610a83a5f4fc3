"""The law of the terms of a loss."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.runlog.json_values import Facts
from trainwright.runlog.records import Examined, Where

LATE = 0.75
"""Of a run: what a schedule is to raise has been raised."""
WHOLE, NOTHING, TRIES, LONG = 16, 1e-5, 4, 128
"""Steps after which a penalty that begins at 0 has left it; between the gradients of two terms: with less, a hundred
thousand steps go as far as one should; looks at terms, of which some may not be possible; steps after which a
threshold should have let something in."""
SMALL = 0.01
"""A weight that is small on purpose: that of a penalty."""


def every_term_matters(case: Case) -> Iterator[Verdict]:
    """Each term of the loss that has a weight has a gradient."""
    every = [each for each in case.outcomes("terms") if "terms" in each.values]
    if not every:
        return
    terms = every[-1].values["terms"]
    if every[-1].values.get("grafted"):
        yield NotApplicable("a part of the loss is made of what a model computes and does not return")
        return
    never = [
        term
        for n, term in enumerate(terms)
        if term["weight"] and all(len(e.values["terms"]) > n and e.values["terms"][n]["norm"] == 0 for e in every)
    ]
    later = [term for term in never if term["idle"] in _AWAITS]
    meant = [(term, why) for term in never if (why := _meant(term, case.finished)) is not None]
    idle = [term["name"] for term in never if term["idle"] != "chosen" and term not in later and _meant(term) is None]
    weak = None if never else _without_effect([e.values["terms"] for e in every])
    if weak is not None and every[-1].step < WHOLE:
        if case.last_step >= WHOLE and len(case.outcomes("terms")) < TRIES:
            yield ExperimentRequest("terms")
    elif weak is not None:
        yield _weak(every[-1], weak)
    elif later and not case.finished and not idle:
        yield NotApplicable(f"{later[0]['name']} is {_AWAITS[later[0]['idle']]}")
    elif later and not idle and every[-1].step < LATE * case.last_step and len(every) <= TRIES:
        yield ExperimentRequest("terms")
    elif never and not idle and not meant:
        yield from _left_out(case, every[-1], never[0]["name"])
    elif not idle and meant:
        yield _without_gradient(every[-1], *meant[0])
    elif not idle or len(idle) == len(terms):
        yield Holds(f"{len(terms)} terms: {', '.join(str(term['name']) for term in terms)}")
    elif len(every) > 1:
        yield _idle(every[-1], idle[0])


def _idle(look: Examined, name: str) -> Finding:
    return finding(
        "law.loss.every_term_matters",
        "warning",
        look.step,
        symptom=f"the term {name} of the loss has no gradient",
        cause="it was detached, made under no_grad, or is constant: it is in the number that is printed, and nothing "
        "is learned from it",
        remedy="keep the graph of what the term is made of, or leave it out of the loss",
        sure=0.85,
        stage="loss",
        where=Where(op=name),
        evidence=[(f"gradient norm of {term['name']}", term["norm"]) for term in look.values["terms"][:6]],
    )


_AWAITS = {
    "switched": "multiplied by zeros, which a schedule may raise",
    "frozen": "made of what is frozen, which may be trained in a later stage",
}
_MEANT = {
    "valued": "all of it was detached, and another term is made of the same values",
    "doubled": "what it is made of was detached, and its gradient is the one that the other terms have already",
}


def _meant(term: Facts, finished: bool = False) -> str | None:
    """Why a term may have no gradient on purpose; None for no reason that is known."""
    if term["idle"] in _AWAITS:
        return f"it is {_AWAITS[term['idle']]}" if finished else None
    return _MEANT.get(term["idle"]) or ("it is 0, and adds nothing" if term["zero"] and not term["idle"] else None)


def _without_gradient(look: Examined, term: Facts, why: str) -> Finding:
    """Of a term that may have none on purpose."""
    return finding(
        "law.loss.every_term_matters",
        "info",
        look.step,
        symptom=f"the term {term['name']} of the loss has no gradient",
        cause=why,
        remedy="nothing, where that is on purpose; else keep the graph of what the term is made of",
        sure=0.5,
        stage="loss",
        where=Where(op=term["name"]),
        evidence=[(f"gradient norm of {term['name']}", 0.0)],
    )


def _left_out(case: Case, look: Examined, name: str) -> Iterator[Verdict]:
    """Of a term that a threshold of outputs leaves out: an info where it does so for long."""
    if look.step >= LONG:
        yield finding(
            "law.loss.every_term_matters",
            "info",
            look.step,
            symptom=f"the term {name} of the loss still has no gradient at step {look.step}",
            cause="it has one for other outputs only: a threshold, a margin or a clamp leaves out all of these",
            remedy="count how much of a batch passes the threshold; lower it, or leave the term out of the loss",
            sure=0.7,
            stage="loss",
            where=Where(op=name),
            evidence=[(f"gradient norm of {name}", 0.0, "above 0")],
        )
        return
    if case.last_step >= LONG and len(case.outcomes("terms")) <= TRIES:
        yield ExperimentRequest("terms")
    yield NotApplicable(f"{name} has a gradient for other outputs only: a threshold leaves out all of these so far")


def _without_effect(looks: list[list[Facts]]) -> int | None:
    """The place of a term whose gradient is next to nothing beside that of another, at each look."""
    for n, term in enumerate(looks[-1]):
        largest = [max(each["norm"] for each in terms) for terms in looks]
        own = [terms[n]["norm"] if len(terms) > n else math.inf for terms in looks]
        if term["weight"] and any(own) and all(0 <= norm < NOTHING * most for norm, most in zip(own, largest)):
            return n
    return None


def _weak(look: Examined, place: int) -> Finding:
    terms = look.values["terms"]
    term, large = terms[place], max(terms, key=lambda each: float(each["norm"]))
    is_weighed = abs(term["own"]) < SMALL and term["norm"] >= NOTHING * large["norm"] * abs(term["weight"])
    return finding(
        "law.loss.every_term_matters",
        "info" if is_weighed else "warning",
        look.step,
        symptom=f"the gradient of the term {term['name']} of the loss is {term['norm'] / large['norm']:.1g} of that of "
        f"{large['name']}: it has no effect",
        cause="its weight, or a mean within it, makes it smaller by orders of magnitude than it was meant",
        remedy="give it a weight with which its gradient is a hundredth of the others' at least, or leave it out",
        sure=0.8,
        stage="loss",
        where=Where(op=term["name"]),
        since_step=1,
        evidence=[(f"gradient norm of {each['name']}", each["norm"]) for each in terms[:6]],
    )
