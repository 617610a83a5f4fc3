from trainwright.doctor import NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.calls import ScalerFacts


@check(stage="update", severity="critical", confidence=0.95, explains=("optim.lr_too_high",))
def gradients_not_unscaled(run: RunContext, facts: ScalerFacts) -> Results:
    """Updates are made with gradients that still contain the loss scale.

    Why it matters: they are up to 65536 times too large. Adam is hardly affected, except by its eps, weight decay in
    the gradient and clipping.

    How it is detected: in two updates, the loss went through `scaler.scale`, but the optimizer steps without
    `scaler.step` or `scaler.unscale_`, or through another scaler.

    Exceptions: gradients that the loop changes by hand, which may be unscaled there.

    Usual cause: `optimizer.step()` stayed where `scaler.step(optimizer)` belongs, or there are two scalers.

    Fix: `scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()`, with one scaler for all three.

    Sources: nerfacc#307, Applio#860.
    """
    if not (facts.steps or facts.scaled_updates):
        yield NotApplicable("no loss is scaled by a GradScaler")
    elif facts.scaled_updates >= 2 or facts.other >= 2:
        is_raw = facts.scaled_updates >= 2
        yield run.finding(
            symptom=f"{facts.scaled_updates} updates were made with the loss scale still in the gradients"
            if is_raw
            else "the loss is scaled by one scaler and the gradients are unscaled by another",
            cause="the loss goes through scaler.scale(), and optimizer.step() is called without unscaling"
            if is_raw
            else "there are two scalers, each with its own scale",
            since_step=facts.since or None,
            evidence=[
                ("updates with scaled gradients", facts.scaled_updates, 0),
                ("steps of another scaler", facts.other, 0),
            ],
        )
