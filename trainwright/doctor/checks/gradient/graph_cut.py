from trainwright.doctor import Every, Results, RunContext, Where, check, listed
from trainwright.doctor.facts.weights import is_intentionally_untrained, unchanged_since
from trainwright.doctor.facts.wiring import WiringFacts


@check(stage="backward", confidence=0.95, explains=("loss.no_better_than_constant", "model.dead_relu"))
def graph_cut(run: RunContext, facts: WiringFacts, seen: Every[WiringFacts]) -> Results:
    """The autograd graph is cut inside the model, so weights that the optimizer holds get no gradient.

    How it is detected: a replay records each function that gets tensors with a graph and returns one without, and the
    weights before it that get no gradient and do not change. A value from NumPy or a Python list has no graph.

    Exceptions: a stop-gradient is reported only with -v if it is outside of the trained path (a teacher, a target), or
    if the weights that it cuts off were trained earlier.

    Usual cause: `.detach()`, `.data`, `.item()`, NumPy, an integer conversion or `torch.no_grad()` in `forward`; a
    codebook loss that uses the output of a straight-through estimator.

    Looks like: gradient.zero_behind_rounding, where there is a gradient of 0; frozen parameters.

    Fix: remove the operation that the finding names, or freeze these weights with `requires_grad_(False)`. With
    reentrant checkpointing use `checkpoint(f, x, use_reentrant=False)`.
    """
    known = [(each, unchanged_since(run, each.behind, seen[-1][0])) for each in facts.cuts]
    cut, behind = next(((each, names) for each, names in known if names), (None, None))
    if cut is None or not behind:
        return
    is_most = 2 * len(behind) >= facts.trained
    yield run.finding(
        seen[-1][0],
        symptom=f"{len(behind)} weights that the optimizer holds get no gradient: {listed(behind)}",
        cause=f"{cut.how} in {cut.inside or 'the model'} ends the graph after {cut.last or 'them'}",
        severity="info" if is_intentionally_untrained(run, behind) else "critical" if is_most else "warning",
        where=Where(module=cut.last, op=cut.how, source=cut.line or run.line_of(f"op:{cut.how}", seen[-1][0])),
        evidence=[("weights behind the cut", len(behind), 0)],
    )
