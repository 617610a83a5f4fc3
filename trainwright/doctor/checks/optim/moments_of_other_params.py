from trainwright.doctor import Results, RunContext, check, listed
from trainwright.doctor.facts.weights import LoadedMomentsFacts

MIN_TENSORS = 4
MIN_LOG10_RATIO = 0.7  # Mean log10 of squared gradient / second moment (a factor of 5)
MAX_MATCHED_FRACTION = 0.5  # Fraction of this mean that remains once moments and gradients are matched


@check(points_at="optimizer_load", stage="update", confidence=0.85, since_step=1)
def moments_of_other_params(run: RunContext, facts: LoadedMomentsFacts) -> Results:
    """The loaded optimizer state belongs to other parameters: its moments are in another order.

    Why it matters: shapes fit, so there is no error. Each of these weights moves with the step size of another one
    until the moments are forgotten, which takes about a thousand steps.

    How it is detected: second moments that exist before the first update are compared with the squared gradients of
    that update, for at least four tensors. The mean of abs(log10) of their ratio is at least 0.7 (a factor of 5). It is
    at most half of that once tensors of the same shape are matched by the size of their gradients.

    Usual cause: `optimizer.load_state_dict` matches the state by position, and the parameter groups were built in
    another order than at the save.

    Looks like: a state of another model, where no order fits.

    Fix: build the groups in the order of the save. Or save by name: `get_optimizer_state_dict(model, optimizer)` and
    `set_optimizer_state_dict` of `torch.distributed.checkpoint.state_dict`.

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
        f"{listed(facts.names)}; after sorting both, by a factor of {10**facts.matched:.3g}",
        evidence=[("mean abs(log10(squared gradient / second moment))", round(gap, 2), round(facts.matched, 2))],
    )
