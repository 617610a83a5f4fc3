from trainwright.doctor import RemedyTrial, Results, RunContext, check
from trainwright.doctor.facts.schedule import LearningRateFacts


@check(
    points_at="step",
    stage="loop",
    confidence=0.95,
    explains=("optim.lr_too_low", "schedule.learning_rate_zero", "schedule.unit_mismatch"),
    since_step=1,
)
def never_stepped(run: RunContext, facts: LearningRateFacts) -> Results:
    """A learning-rate scheduler is created, but its `step()` is never called.

    Why it matters: with a warm-up from 0 the learning rate stays 0 and nothing is trained; else it never decays.

    How it is detected: no call of `step()`, and either a learning rate of 0 in every step (critical), or the same
    learning rate until the end of a run of at least two epochs.

    Exceptions: `ReduceLROnPlateau`, which may wait.

    Usual cause: the call is missing, or is in a branch that is never reached.

    Fix: call `scheduler.step()` after each `optimizer.step()`. A warm-up that begins above 0:
    `LambdaLR(optimizer, lambda step: min(1, (step + 1) / 100))`.
    """
    if any(each.calls for each in facts.schedulers):
        return
    stands_still = facts.base > 0.0 and facts.zero_steps == facts.steps >= 2
    waits = not facts.schedulers or facts.schedulers[0].kind == "ReduceLROnPlateau"
    is_unused = run.finished and not waits and len(facts.lrs) == 1 and facts.epochs >= 2
    if stands_still or is_unused:
        yield run.finding(
            symptom="the learning rate is 0 in every step, and scheduler.step() is never called"
            if stands_still
            else "scheduler.step() is never called",
            severity="critical" if stands_still else "warning",
            evidence=[("calls of scheduler.step()", 0, facts.steps), ("learning rate", facts.lrs[-1][1], facts.base)],
            trial=RemedyTrial("another_rate", {"lr": facts.base or 1e-3}),
        )
