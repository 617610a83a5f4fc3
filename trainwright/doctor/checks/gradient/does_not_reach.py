"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import NotApplicable, Passed, Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.gradient import DerivativeFacts
from trainwright.doctor.finding import ExperimentRequest, listed
from trainwright.doctor.shared_standing import is_left_as_it_is, standing
from trainwright.runlog.records import Where

AGAIN = 5
"""The next comparison is due at this many times the step of the last one: about steps 1, 6, 32, 160."""


@check(names_cause=False, stage="backward", confidence=0.95, explains=("model.missing_nonlinearity",))
def does_not_reach(run: RunContext) -> Iterator[Result]:
    """The loss depends on weights that get no gradient.

    How it is detected: the slope of the loss along each weight that an optimizer holds and that has no gradient, by
    difference quotients of a replay in float64, at two examinations.

    Exceptions: weights that change all the same (averages, codebooks); a part that is not trained on purpose (a
    teacher, weights that were trained before), reported only with -v.

    Usual cause: a `detach()`, `.data`, `no_grad`, `round` or a rebuilt tensor between the weights and the loss, or a
    term of the loss that is not added.

    Looks like: gradient.graph_cut, which names the place; an expert without samples, on which the loss does not depend.

    Fix: keep the graph from these weights to the loss, or leave them out of the optimizer.
    """
    looks = run.every(DerivativeFacts)
    if run.steps and (not looks or run.last_step > AGAIN * looks[-1][0]):
        yield ExperimentRequest(DerivativeFacts.experiment)
    if not looks:
        if (why := run.not_measured(DerivativeFacts)) is not None and run.was_tried(DerivativeFacts):
            yield NotApplicable(why)
        return
    step, facts = looks[-1]
    always = [{name for each in seen.unreached for name in each.names} for _, seen in looks]
    names = [name for each in facts.unreached for name in each.names if all(name in seen for seen in always)]
    cut = standing(run, names, looks[0][0]) if names else []
    if cut is None:
        return  # the next examination shows whether they change all the same
    if not cut:
        yield Passed(f"{facts.tensors} tensors at {len(looks)} steps")
    elif len(looks) > 1 or run.finished:  # in a single step a part may have its turn in another
        ends = sorted({f"{how} in {module or 'the model or the loss'}" for how, module in facts.cuts})
        slopes = next(each for each in facts.unreached if set(each.names) & set(cut))
        share = facts.unreached_share
        yield run.finding(
            step,
            symptom=f"the loss depends on {len(cut)} weights that get no gradient: {listed(cut)}",
            cause=f"the graph ends between them and the loss: {listed(ends)}" if ends else "",
            severity="info" if is_left_as_it_is(run, cut) else "critical" if share > 0.5 else "warning",
            since_step=looks[0][0],
            where=Where(module=cut[-1].rpartition(".")[0], op=facts.cuts[0][0] if len(ends) == 1 else None),
            evidence=[
                (f"slope of its gradient along {slopes.names[0]}", 0.0, slopes.of_loss or slopes.coarse),
                ("fraction of the trained weights without a gradient", round(share, 4), 0.0),
            ],
        )
