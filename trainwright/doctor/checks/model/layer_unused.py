from trainwright.doctor import Every, Results, RunContext, Where, check, listed
from trainwright.doctor.facts.weights import WeightsFacts, is_intentionally_untrained, unchanged_since
from trainwright.doctor.facts.wiring import WiringFacts

MIN_UPDATES = 6  # Updates in which the weights have not changed, because a loop may train its layers in turn


@check(stage="backward", confidence=0.85, points_at="construction", since_step=1)
def layer_unused(run: RunContext, facts: WiringFacts, weights: WeightsFacts, seen: Every[WiringFacts]) -> Results:
    """A layer is declared and never used: the loss does not depend on its weights, so they never get a gradient.

    Why it matters: the weights stay at their random initial values. The model is not the one that was described, and
    DistributedDataParallel raises an error.

    How it is detected: a replay of an early step. The module that owns the layer was called, the optimizer holds the
    weights, the loss gives them no gradient, and they have not changed in 6 updates.

    Exceptions: layers in a list of which others are used, such as experts; modules of libraries, which may have layers
    for other tasks. Weights that were trained before are reported only with -v.

    Usual cause: `forward` does not call the layer, calls another layer twice instead, or does not use its output; a
    term of the loss is computed and not added.

    Looks like: gradient.graph_cut, where an operation ends the graph; optim.params_not_registered, where the layer is
    used and not in the optimizer.

    Fix: call the layer in `forward`, or remove it. Add the loss of each output to the total.

    Sources: sooftware/conformer#46, inria-thoth/HySUPP#3, NVlabs/PWC-Net#110.
    """
    step = seen[-1][0]
    names = unchanged_since(run, facts.idle, step) if facts.idle else None
    if not names or (weights.updates < MIN_UPDATES and not run.finished):
        return
    yield run.finding(
        step,
        symptom=f"{len(names)} weights that the optimizer holds get no gradient, and nothing cuts the graph: "
        f"{listed(names)}",
        severity="info" if is_intentionally_untrained(run, names) else None,
        where=Where(module=names[0].rpartition(".")[0] or names[0]),
        evidence=[("weights on which the loss does not depend", len(names), 0)],
    )
