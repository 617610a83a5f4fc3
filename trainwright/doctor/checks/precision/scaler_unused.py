from trainwright.doctor import NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.calls import CallsFacts

BACKWARD_PASSES = 8
"""Backward passes after which a scaler that has scaled no loss counts as unused."""


@check(points_at="backward", stage="loop", confidence=0.95, needs=CallsFacts)
def scaler_unused(run: RunContext) -> Results:
    """A GradScaler is given to the watch, and no loss is scaled by it.

    Why it matters: in float16, gradients below 6e-8 are 0 without a scale.

    How it is detected: an enabled `torch.amp.GradScaler` in `tw.watch(scaler=...)`, no call of its `scale` in 8
    backward passes.

    Looks like: precision.fp16_underflow, gradient.vanishing.

    Usual cause: `loss.backward()` in place of `scaler.scale(loss).backward()`, or a second scaler that is used instead.

    Fix: `scaler.scale(loss).backward()`, `scaler.step(optimizer)`, `scaler.update()`. With bfloat16 or float32 no
    scaler is needed: leave it out.

    Sources: pytorch.org/docs/stable/notes/amp_examples.html
    """
    facts = run.measured(CallsFacts)
    if facts.backwards < BACKWARD_PASSES:
        return
    if not facts.idle_scalers:
        yield NotApplicable("no GradScaler was given, or it scales a loss")
        return
    yield run.finding(
        run.last_step,
        symptom="a GradScaler is given, and no loss is scaled by it",
        severity="warning",
        since_step=1,
        evidence=[("calls of scaler.scale()", 0, facts.backwards)],
    )
