from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.calls import CallsFacts


@check(stage="update", severity="critical", confidence=0.97, explains=("optim.lr_too_high",))
def params_in_two_optimizers(run: RunContext, facts: CallsFacts) -> Results:
    """Two optimizers hold the same parameters, and both step.

    How it is detected: two optimizers, watched or not, step after the same backward pass and share parameters that have
    a gradient.

    Usual cause: the optimizer was created again and the old one still steps, or parameter lists overlap.

    Fix: give every parameter to one optimizer: `taken = {id(p) for p in model.head.parameters()}`, then
    `[p for p in model.parameters() if id(p) not in taken]` for the other one.
    """
    if facts.doubles >= min(2, max(1, len(run.steps))):
        yield run.finding(evidence=[("updates with gradients that another optimizer applied", facts.doubles, 0)])
