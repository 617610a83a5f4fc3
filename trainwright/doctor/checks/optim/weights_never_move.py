"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import NotApplicable, Passed, Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.weights import StillFacts, WeightsFacts
from trainwright.doctor.finding import ExperimentRequest, listed
from trainwright.doctor.shared_standing import is_left_as_it_is
from trainwright.runlog.records import Where

FIRST, ENOUGH, LATE = 4, 12, 40
"""Updates after which something has moved, every part has, and even a rarely used part."""


@check(names_cause=False, stage="update", confidence=0.7, needs=WeightsFacts)
def weights_never_move(run: RunContext) -> Iterator[Result]:
    """Weights do not change, though the optimizer updates them at a learning rate above 0.

    Why it matters: what does not change learns nothing.

    How it is detected: checksums of all weights at each examination, beside the first ones and the last ones. A weight
    stands still if it has not changed in 12 updates from the start or in 40 lately, or if its gradient was always 0, so
    that only decay moves it. A replay then changes it and measures whether the loss depends on it.

    Exceptions: a bias that cancels out in a loss of differences; weights trained before, or beside all that is
    trained: these are reported with -v.

    Usual cause: the optimizer holds other tensors than the model, the graph is cut (detach, .data, no_grad), or what
    the weight passes through is flat or unused.

    Looks like: schedule.learning_rate_zero, gradient.graph_cut, model.init_both_factors_zero.

    Fix: compare a weight and its gradient before and after `optimizer.step()`; make the optimizer of
    `model.parameters()` after the model is complete.
    """
    facts = run.latest(WeightsFacts)
    if facts is None or not facts.tensors:
        yield NotApplicable("no trainable tensor belongs to a watched optimizer with a learning rate above 0")
        return
    is_flat = not facts.has_gradient
    since = facts.updates_since if facts.moved else facts.updates
    if facts.at_0_since == 0 and since >= (
        FIRST if not facts.moved and not is_flat else LATE if facts.moved else ENOUGH
    ):
        yield run.finding(
            facts.steps,
            symptom=f"no weight has changed in {since} updates" + (": no gradient reaches any" if is_flat else ""),
            cause="the loss does not depend on the weights, or the gradients are dropped before the update"
            if is_flat
            else "",
            severity="warning" if is_flat or facts.moved else "critical",
            sure=0.9,
            since_step=facts.stands_since + 1,
            evidence=[("tensors that moved", 0, facts.tensors), ("updates at a rate above 0", since)],
        )
    elif facts.updates >= ENOUGH and facts.moved and facts.still:
        yield from _some(run, facts)
    elif facts.updates >= FIRST:
        yield Passed(f"{facts.moved} of {facts.tensors} tensors over {facts.updates} updates")


def _some(run: RunContext, facts: WeightsFacts) -> Iterator[Result]:
    measured = run.every(StillFacts)
    if (not measured or facts.updates >= LATE > measured[-1][0]) and not (run.was_tried(StillFacts) and not measured):
        yield ExperimentRequest(StillFacts.experiment)
    effects = {each.name: each for _, known in measured for each in known.tensors}
    still = [effects[name] for name in facts.still if name in effects]
    needed = [each for each in still if each.effect]
    unused = [each for each in still if not each.effect]
    if not still:
        yield Passed(f"{facts.moved} of {facts.tensors} tensors over {facts.updates} updates")
        return
    names = [each.name for each in needed or unused]
    cancels = not needed and all(each.cancels for each in unused)
    if needed:
        is_meant = is_left_as_it_is(run, names)
        cause = "its gradient is exactly 0: an operation behind it is flat, such as a dead unit, a factor of 0 or a "
        cause += "clamp"
        cause = (
            cause if needed[0].reached else "no gradient arrives there: detach(), .data, item(), no_grad() or argmax"
        )
    else:
        is_meant = not ((facts.updates >= LATE and not cancels) or len(unused) == facts.tensors)
        cause = "a bias cancels out in a loss of differences" if cancels else "the forward pass does not use it"
    yield run.finding(
        facts.steps,
        symptom=f"{listed(names)} did not learn in {facts.updates} updates; the loss "
        + ("depends on it" if needed else "does not depend on it"),
        cause=cause,
        remedy="look at the operations behind it" if needed else "use it in forward(), or leave it out of the model",
        severity="info" if is_meant else "warning",
        sure=0.8 if needed else 0.6,
        stage="backward" if needed else "forward",
        where=Where(module=names[0].rpartition(".")[0]),
        since_step=1,
        evidence=[
            ("relative change of the loss where it changes", needed[0].effect if needed else 0.0),
            ("tensors that stand still", facts.num_still, 0),
        ],
    )
