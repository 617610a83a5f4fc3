from trainwright.doctor import Results, RunContext, check, listed
from trainwright.doctor.facts.weights import LoadedMomentsFacts

MIN_TENSORS = 4
MIN_LOG10_RATIO = 0.7  # Mean log10 of squared gradient / second moment (a factor of 5)
MAX_MATCHED_FRACTION = 0.5  # Fraction of this mean that remains once moments and gradients are matched


@check(points_at="optimizer_load", stage="update", confidence=0.85, since_step=1)
def moments_of_other_params(run: RunContext, facts: LoadedMomentsFacts) -> Results:
    """The optimizer continues with moments that belong to other parameters.

    Why it matters: shapes fit, so nothing fails. Each of these weights moves with the step size of another one until
    the moments are forgotten, which takes a thousand steps.

    How it is detected: second moments that exist before the first update are compared with the squared gradients of
    that update. They differ by a factor of 5 on average, but by less than half as much once tensors of the same shape
    are rematched by the size of their gradients.

    Usual cause: `optimizer.load_state_dict` matches the state by position, and the parameter groups were built in
    another order than when it was saved.

    Looks like: a state of another model, where no order fits.

    Fix: build the groups in the same order, or save with names: `torch.optim.Optimizer` state by
    `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`.

    Sources: pytorch/pytorch#1489, pytorch/pytorch#6031, fairscale#380.
    """
    if len(facts.gaps) < MIN_TENSORS:
        return
    gap = sum(facts.gaps) / len(facts.gaps)
    if gap < MIN_LOG10_RATIO or facts.matched > MAX_MATCHED_FRACTION * gap:
        return
    yield run.finding(
        1,
        symptom=f"squared gradients and loaded second moments differ by a factor of {10**gap:.3g} on average, most for "
        f"{listed(facts.names)}; matched in another order by {10**facts.matched:.3g}",
        evidence=[("mean log10 of their ratio", round(gap, 2), round(facts.matched, 2))],
    )
