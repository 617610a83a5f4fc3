from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.calls import CallsFacts


@check(
    points_at="step", stage="update", severity="critical", confidence=0.95, needs=CallsFacts,
    explains=("optim.lr_too_high",),
)  # fmt: skip
def stepped_twice(run: RunContext) -> Results:
    """An optimizer makes two updates for one backward pass.

    Why it matters: with SGD the learning rate is doubled; with Adam the moments count every gradient twice.

    How it is detected: two updates of one optimizer without a backward pass in between, twice. An optimizer that calls
    another one inside of its step (SAM, Lookahead) makes one update.

    Usual cause: `optimizer.step()` and `scaler.step(optimizer)` are both called, or `step()` is in the loop and in a
    callback.

    Looks like: optim.params_in_two_optimizers, where two optimizers hold the same parameters.

    Fix: keep one of the two calls; with a GradScaler that is `scaler.step(optimizer)`.
    """
    facts = run.measured(CallsFacts)
    if facts.again >= 2:
        yield run.finding(run.last_step, evidence=[("updates without a backward pass since the last", facts.again, 0)])
