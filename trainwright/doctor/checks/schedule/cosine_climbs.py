from trainwright.doctor import NotApplicable, RemedyTrial, Results, RunContext, check
from trainwright.doctor.facts.schedule import LearningRateFacts


@check(points_at=("scheduler", "schedule"), stage="loop", confidence=0.95)
def cosine_climbs(run: RunContext, facts: LearningRateFacts) -> Results:
    """A cosine schedule is stepped beyond its end, and the learning rate climbs back.

    Why it matters: after twice `T_max` it is at its peak again; the run ends with a high rate and does not converge.

    How it is detected: `CosineAnnealingLR` with `last_epoch > T_max` whose rate rises.

    Exceptions: schedules whose class is a cycle (warm restarts, one-cycle, cyclic).

    Usual cause: `T_max` is shorter than the run, or counts in another unit.

    Fix: `CosineAnnealingLR(optimizer, T_max=total_steps)`, in calls of `scheduler.step()`; stop stepping it at its end.

    Sources: CodefyUI#205, HALOs#33.
    """
    rates = [lr for _, lr in facts.lrs]
    if len(rates) < 3:
        yield NotApplicable("the learning rate is constant")
        return
    parts = [part for each in facts.schedulers for part in each.parts if part.kind == "CosineAnnealingLR"]
    past = [(part.T_max, part.last_epoch) for part in parts if part.T_max is not None and part.last_epoch > part.T_max]
    if past and rates[-1] > rates[-2]:
        length, calls = past[0]
        yield run.finding(
            symptom=f"the learning rate rises again, {rates[-2]:.3g} -> {rates[-1]:.3g}: the cosine ends after "
            f"{length:g} calls of scheduler.step()",
            since_step=int(facts.lrs[-1][0]),
            evidence=[("calls of scheduler.step()", calls, f"<= {length:g}")],
            trial=RemedyTrial("another_rate", {"lr": max(min(rates), 0.01 * facts.peak)}),
        )
