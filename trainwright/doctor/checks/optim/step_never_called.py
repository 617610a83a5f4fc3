from trainwright.doctor import Results, RunContext, by_experiment, check
from trainwright.doctor.facts.calls import CallsFacts, kinds
from trainwright.doctor.facts.weights import WeightsFacts

MIN_STEPS = 3  # Steps of a finished run without an update
MIN_STEPS_SO_FAR = 64  # Steps of an unfinished run without an update: a custom step may accumulate over several


@check(points_at="backward", stage="update", severity="critical", confidence=0.98, explains=("loop.unseen",))
def step_never_called(run: RunContext, facts: CallsFacts) -> Results:
    """`backward()` runs and `optimizer.step()` is never called, so no weight changes.

    How it is detected: by the end of the run there are three or more backward passes (eight if it failed), no update,
    and no changed weight; in a loop with a custom step also during the run, after 64 steps. Or one of several
    optimizers never steps in a run of at least 20 steps, although its parameters have gradients (a warning).

    Usual cause: the call is missing, or its condition is never true: `(i + 1) % accumulation == 0` where an epoch has
    fewer batches than that.

    Looks like: optim.zero_grad_before_step, where `step()` is called and finds no gradients; a loss scaler that skips
    every step.

    Fix: `optimizer.step()` after `backward()`; with a scaler `scaler.step(optimizer); scaler.update()`.
    """
    done = {v["optimizer"] for each in run.steps for _, v in kinds(each, "step") if isinstance(v, dict)}
    done |= {v for each in run.steps for _, v in kinds(each, "scaler_skipped")}
    idle = 0 if done else sum(not {"nonfinite", "vetoed"} & each.values.keys() for each in run.steps)
    weights = [weights for _, weights in run.every(WeightsFacts)]
    if idle >= (MIN_STEPS if run.finished else MIN_STEPS_SO_FAR) and weights and not weights[-1].moved:
        symptom = f"no weight has changed in {weights[-1].steps} steps: optimizer.step() is never called"
        yield run.finding(1, symptom=symptom, evidence=[("updates", 0, weights[-1].steps)])
    if not run.finished:
        return
    if not run.steps:
        outcomes = by_experiment(run.records).get("unfinished")
        error = outcomes[-1].values.get("error") if outcomes else None
        if facts.backwards >= (8 if error else 3) and not facts.moved and not facts.steps_seen:
            symptom = f"{facts.backwards} backward passes, and optimizer.step() is never called: no weight changes"
            yield run.finding(1, symptom=symptom, evidence=[("steps", 0, facts.backwards)])
        return
    for number, optimizer in enumerate(facts.optimizers):
        waits = number not in done and any(group.with_grad for group in optimizer.groups)
        if len(facts.optimizers) > 1 and len(run.steps) >= 20 and waits:
            yield run.finding(
                symptom=f"the parameters of optimizer {number} get gradients, and its step() was never called",
                severity="warning",
                sure=0.8,
                evidence=[("calls of its step()", 0, len(run.steps))],
            )
