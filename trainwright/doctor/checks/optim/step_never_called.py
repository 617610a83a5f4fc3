from trainwright.doctor import Results, RunContext, by_experiment, check
from trainwright.doctor.facts.calls import CallsFacts, kinds


@check(points_at="backward", stage="update", severity="critical", confidence=0.98, explains=("loop.unseen",))
def step_never_called(run: RunContext, facts: CallsFacts) -> Results:
    """`backward()` runs and `optimizer.step()` is never called, so no weight changes.

    How it is detected: the run has three or more backward passes, no update, and no changed weight. Or one of several
    optimizers never steps in a run of 20 steps, although its parameters have gradients (a warning).

    Usual cause: the call is missing, or its condition is never true: `(i + 1) % accumulation == 0` where an epoch has
    fewer batches than that.

    Looks like: optim.zero_grad_before_step, where `step()` is called and finds no gradients; a loss scaler that skips
    every step.

    Fix: `optimizer.step()` after `backward()`; with a scaler `scaler.step(optimizer); scaler.update()`.
    """
    if not run.finished:
        return
    if not run.steps:
        outcomes = by_experiment(run.records).get("unfinished")
        error = outcomes[-1].values.get("error") if outcomes else None
        if facts.backwards >= (8 if error else 3) and not facts.moved and not facts.steps_seen:
            symptom = f"{facts.backwards} backward passes, and not one call of an optimizer's step(): no weight changes"
            yield run.finding(1, symptom=symptom, evidence=[("steps", 0, facts.backwards)])
        return
    done = {v["optimizer"] for each in run.steps for _, v in kinds(each, "step") if isinstance(v, dict)}
    done |= {v for each in run.steps for _, v in kinds(each, "scaler_skipped")}
    for number, optimizer in enumerate(facts.optimizers):
        waits = number not in done and any(group.with_grad for group in optimizer.groups)
        if len(facts.optimizers) > 1 and len(run.steps) >= 20 and waits:
            yield run.finding(
                symptom=f"the parameters of optimizer {number} get gradients, and its step() was never called",
                severity="warning",
                sure=0.8,
                evidence=[("steps of it", 0, len(run.steps))],
            )
