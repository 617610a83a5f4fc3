"""The laws of what the first steps learn far better without: data that are cut, poles, weights far from the others."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import finding, in_words
from trainwright.doctor.function.factors import does_harm, due, losses_of
from trainwright.doctor.function.facts import WithoutCutFacts, WithoutOutliersFacts, WithoutPolesFacts
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.doctor.loss.trained import was_trained_before
from trainwright.runlog.records import Where


def data_come_whole(case: Case) -> Iterator[Verdict]:
    """Where data are rounded or cut off, the first steps do not learn far more with the data whole."""
    facts = case.newest(WithoutCutFacts)
    if facts is None:
        yield from due(case, WithoutCutFacts)
        return
    if facts.op is None:
        yield NotApplicable("the model rounds no data, and cuts nothing off of them")
        return
    if not does_harm(facts):
        yield Holds(f"loss {facts.after:.4g} with {facts.op}() on data, {facts.after_without:.4g} without it")
        return
    yield finding(
        "law.function.data_come_whole",
        "warning",
        case.last_step,
        symptom=f"{facts.op}() in {in_words(facts.module)} cuts off or rounds what the model is given; steps "
        f"{facts.since} to {facts.until} bring the loss to {facts.after:.4g}, and to {facts.after_without:.4g} without",
        cause="an activation stands in front of the first layer, or numbers go through an integer type",
        remedy=f"leave {facts.op}() out, or put it behind the layer",
        sure=0.8,
        stage="forward",
        where=Where(module=facts.module, source=facts.line),
        since_step=1,
        evidence=losses_of(facts, "with the data whole"),
    )


def divisors_stay_off_0(case: Case) -> Iterator[Verdict]:
    """Where a divisor that weights make passes through 0, the first steps do not learn far more with it off 0."""
    facts = case.newest(WithoutPolesFacts)
    if facts is None:
        yield from due(case, WithoutPolesFacts)
        return
    if facts.module is None:
        yield NotApplicable("the model divides by nothing that passes through 0")
        return
    if not does_harm(facts):
        yield Holds(f"loss {facts.after:.4g} as it is, {facts.after_without:.4g} with the divisor off 0")
        return
    yield finding(
        "law.function.divisors_stay_off_0",
        "warning",
        case.last_step,
        symptom=f"a divisor in {in_words(facts.module)} has both signs, and comes as near to 0 as {facts.nearest:.2g} "
        f"of its size; steps {facts.since} to {facts.until} bring the loss to {facts.after:.4g}, and to "
        f"{facts.after_without:.4g} where it is kept away from 0",
        cause="what weights make is divided by where it should be multiplied, or nothing keeps it above 0",
        remedy="multiply, or divide by what is surely above 0: softplus(x) + eps, an absolute value, a norm",
        sure=0.8,
        stage="forward",
        where=Where(module=facts.module, source=facts.line),
        since_step=1,
        evidence=losses_of(facts, "off 0"),
    )


def weights_begin_alike(case: Case) -> Iterator[Verdict]:
    """Where some weights of a tensor begin far beyond the others, the first steps do not learn far more without."""
    facts = case.newest(WithoutOutliersFacts)
    if facts is None and was_trained_before(case):
        yield NotApplicable("the model was trained before, and a few weights of it may stand out")
        return
    if facts is None:
        yield from due(case, WithoutOutliersFacts)
        return
    if facts.name is None:
        yield NotApplicable("no weights begin far beyond the others of their tensor")
        return
    if not does_harm(facts):
        yield Holds(
            f"loss {facts.after:.4g} as it is, {facts.after_without:.4g} with these weights nearer to the others"
        )
        return
    yield finding(
        "law.function.weights_begin_alike",
        "warning",
        case.last_step,
        symptom=f"the largest weight of {facts.name} began at {facts.times:.3g} times the size of the one in the "
        f"middle; steps {facts.since} to {facts.until} bring the loss to {facts.after:.4g}, and to "
        f"{facts.after_without:.4g} with such weights brought to ten times that",
        cause="it was made without initial values (torch.empty), or of a quotient: a few weights drown all others",
        remedy="draw it from a normal or uniform distribution: nn.init.normal_(w, std=0.02), xavier_uniform_(w)",
        sure=0.85,
        stage="forward",
        where=Where(module=facts.name.rpartition(".")[0] or facts.name),
        since_step=1,
        evidence=losses_of(facts, "with these weights nearer to the others"),
    )
