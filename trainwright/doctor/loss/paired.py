"""The law of pairs: where a loss has no targets, it has learned which rows of its inputs belong together."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.doctor.loss.facts import LearnedFacts, PairedInput, PairsFacts
from trainwright.doctor.loss.learned import CERTAIN, LEARNED, LEAST, still_learns

EXACT = 1e-5
"""Of the loss: a sum in another order."""
RELATED = 1e-3
"""Of the loss: less is what an iteration for two sets of rows leaves, and no row belongs to another."""


def pairs_are_learned(case: Case) -> Iterator[Verdict]:
    """In the end a loss without targets is larger where the rows of one of its inputs are in another order."""
    learned, facts = case.newest(LearnedFacts), case.newest(PairsFacts)
    if learned is None or case.last_step < LEARNED:
        return
    if learned.calls or learned.drawn:
        yield NotApplicable("the loss has targets, or is of what the model draws")
        return
    if facts is None:
        why = case.blind(PairsFacts)
        yield NotApplicable(why) if why is not None else ExperimentRequest(PairsFacts.experiment)
        return
    if facts.num_optimizers > 1 or not facts.inputs:
        yield NotApplicable("several optimizers play a game" if facts.inputs else "the loss is not finite")
        return
    best = max(facts.inputs, key=lambda each: each.rise)
    if any(each.square and each.related <= EXACT for each in facts.inputs):
        yield _unpaired(case, facts, best)
        return
    if all(each.related < RELATED for each in facts.inputs):
        yield NotApplicable("the inputs are sets of rows: none belongs to another")
        return
    gained = (facts.constant - facts.loss) / max(abs(facts.constant), 1e-12)
    if max(best.rise, gained) >= LEAST + best.error or best.error > CERTAIN:
        yield Holds(f"{facts.loss:.4g}, with other pairs {best.rise:.1%} more, with one row alone {facts.constant:.4g}")
        return
    if (young := still_learns(case)) is not None:
        yield NotApplicable(f"still learning: {young}")
        return
    yield _unpaired(case, facts, best)


def _unpaired(case: Case, facts: PairsFacts, best: PairedInput) -> Finding:
    return finding(
        "law.loss.pairs_are_learned",
        "warning",
        case.last_step,
        symptom=f"after {case.last_step} steps the loss is {facts.loss:.4g}, and no larger where the rows of one input "
        "belong to others of the rest",
        cause="the loss compares each row with all others alike (a dimension that broadcasts), has the same pairs on "
        "both sides, or the rows of the inputs lie beside each other",
        remedy="look at the shapes of what the loss compares, and at the rows of one batch side by side",
        sure=0.7,
        stage="loss",
        evidence=[
            ("rise of the loss with an input in another order, as a share", round(best.rise, 4), f">= {LEAST}"),
            ("loss with one row in place of all", facts.constant, facts.loss),
        ],
    )
