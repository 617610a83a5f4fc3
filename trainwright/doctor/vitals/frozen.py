"""The law of what is not trained."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, finding, listed
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.doctor.vitals.facts import FrozenFacts, VitalsFacts
from trainwright.runlog.records import Where

ENOUGH = 12
"""Updates after which what is trained in turns has had its turn."""
MATTERS, MUCH = 0.02, 0.1
"""Of the gradient: less could not change much, trained or not; so much of a part in the middle is missed."""


def fresh_weights_are_trained(case: Case) -> Iterator[Verdict]:
    """Weights that were not trained before are trained: all but what comes before everything that is trained."""
    vitals = case.newest(VitalsFacts)
    if vitals is None or vitals.updates < ENOUGH:
        return
    if not vitals.frozen_still:
        yield NotApplicable("no matrix is frozen")
        return
    known = [facts for _, facts in case.every(FrozenFacts)]
    if not known:
        why = case.blind(FrozenFacts)
        yield ExperimentRequest(FrozenFacts.experiment) if why is None else NotApplicable(why)
        return
    if case.finished and len(known) == 1 and any(each.is_behind for each in known[0].tensors):
        yield ExperimentRequest(FrozenFacts.experiment)  # what matters little at first may matter in the end
    facts = max(known, key=lambda each: max((tensor.share for tensor in each.tensors), default=0.0))
    fresh = [each for each in facts.tensors if each.name not in vitals.worked_on]
    bad = [each for each in fresh if (each.is_zero or each.is_behind) and each.share > MATTERS]
    if not bad:
        yield Holds(f"{vitals.frozen_still} frozen matrices")
        return
    names = [each.name for each in bad]
    missed = [each for each in bad if not each.is_meant]
    is_dear = any(each.is_zero or each.is_last or each.share > MUCH for each in missed)
    yield finding(
        "law.vitals.fresh_weights_are_trained",
        "warning" if is_dear else "info",
        case.last_step,
        symptom=f"{listed(names)} cannot be trained (requires_grad is False), "
        + ("with nothing but zeros" if bad[0].is_zero else "with the values of a fresh initialisation")
        + f"; it would have {sum(each.share for each in bad):.0%} of the gradient",
        cause="a part that is to be learned was frozen along with others, or instead of them",
        remedy="freeze only what was trained before; set requires_grad_(True) for new parts",
        sure=0.75,
        stage="update",
        where=Where(module=names[0].rpartition(".")[0]),
        since_step=1,
        evidence=[(f"share of the gradient that {each.name} would have", round(each.share, 3)) for each in bad],
    )
