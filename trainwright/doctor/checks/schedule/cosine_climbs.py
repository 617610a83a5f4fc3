from trainwright.doctor import NotApplicable, RemedyTrial, Results, RunContext, check
from trainwright.doctor.facts.schedule import LearningRateFacts


@check(points_at=("scheduler", "schedule"), stage="loop", confidence=0.95)
def cosine_climbs(run: RunContext, facts: LearningRateFacts) -> Results:
    """A cosine schedule is stepped beyond its end, and the learning rate climbs back.

    Why it matters: after 2 * `T_max` calls it is at its peak again. The run ends at a high learning rate without
    convergence.

    How it is detected: the learning rate rises while a `CosineAnnealingLR` has `last_epoch > T_max`.

    Exceptions: schedules whose class is a cycle (warm restarts, one-cycle, cyclic).

    Usual cause: `T_max` is shorter than the run, or counts in another unit.

    Fix: `CosineAnnealingLR(optimizer, T_max=n)`, where n is the number of calls of `scheduler.step()` in the run.

    Sources: CodefyUI#205, HALOs#33.
    """
    if len(facts.lrs) < 3:
        yield NotApplicable("the learning rate is constant")
        return
    parts = [part for each in facts.schedulers for part in each.parts if part.kind == "CosineAnnealingLR"]
    past = [(part.T_max, part.last_epoch) for part in parts if part.T_max is not None and part.last_epoch > part.T_max]
    if past and facts.climbed:
        (length, calls), (step, before, now) = past[0], facts.climbed
        yield run.finding(
            symptom=f"the learning rate rises again, {before:.3g} -> {now:.3g}: the cosine ends after "
            f"{length:g} calls of scheduler.step()",
            since_step=int(step),
            evidence=[("calls of scheduler.step()", calls, f"<= {length:g}")],
            trial=RemedyTrial("another_rate", {"lr": max(min(lr for _, lr in facts.lrs), 0.01 * facts.peak)}),
        )
