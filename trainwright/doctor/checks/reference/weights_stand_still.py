from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.reference import MIN_STEPS, ReferenceFacts, traits_of


@check(stage="update", confidence=0.85, names_cause=False)
def weights_stand_still(run: RunContext, reference: ReferenceFacts) -> Results:
    """Fewer weights change than in the reference run.

    How it is detected: the number of trainable tensors that have changed since the start, if both runs have equally
    many trainable tensors.

    Usual cause: a part of the model that is cut off from the loss, frozen, or missing in the optimizer.

    Looks like: gradient.graph_cut, optim.weights_never_move, which name the weights.

    Fix: compare the parameters of the optimizer and the forward pass with those of the reference run.
    """
    if (here := traits_of(run)).steps < MIN_STEPS:
        return
    there = reference.traits
    if here.moved is None or there.moved is None or here.tensors is None or here.tensors != there.tensors:
        return
    if here.moved < there.moved:
        yield run.finding(
            symptom=f"{here.moved} of {here.tensors} weights have changed, {there.moved} in the reference run",
            evidence=[("weights that have changed", here.moved, there.moved)],
        )
