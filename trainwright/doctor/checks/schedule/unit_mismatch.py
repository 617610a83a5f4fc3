import math

from trainwright.doctor import NotApplicable, RemedyTrial, Results, RunContext, check
from trainwright.doctor.facts.schedule import LearningRateFacts, PartFacts, SchedulerFacts


@check(
    points_at="schedule",
    stage="loop",
    confidence=0.9,
    explains=("optim.lr_too_low", "schedule.cosine_climbs", "schedule.learning_rate_zero"),
)
def unit_mismatch(run: RunContext, facts: LearningRateFacts) -> Results:
    """The schedule is stepped in a different unit (micro-batches, updates, epochs) than it counts in, or several times
    for one update.

    Why it matters: the learning rate is near 0 after the first part of the run, or never leaves the warm-up. If each of
    8 ranks steps the schedule, the decay is over after an eighth of the run.

    How it is detected: `scheduler.step()` is called after every micro-batch. Or it is called after every update,
    although the schedule ends within one epoch (a cosine within half of one, and the run goes on). Or the schedule is
    as long as the run has updates, but is called at most a quarter as often. Or each update is followed by the same
    number of calls, two or more. Or calls are repeated without an update in between: about as often as after an update,
    or at least twice if at least eight calls come after one update each.

    Usual cause: a schedule that counts epochs is stepped for each batch, or the other way round; a scheduler that
    `accelerate` prepared, which steps once for each rank; a call per step and another per epoch; a duplicate call.

    Fix: call `scheduler.step()` in one place, and count `T_max`, `total_steps`, `step_size` in these calls:
    `epochs * len(loader) // accumulation` for one call after each update, `epochs` for one at the end of each epoch.
    With accelerate, do not prepare the scheduler, or multiply its length by `accelerator.num_processes`.

    Sources: k-diffusion#50, ludwig#3555, accelerate#2926, huggingface/transformers#24088, EasyContext#21.
    """
    if not facts.schedulers:
        yield NotApplicable("no scheduler is known")
        return
    for each in facts.schedulers:
        if (symptom := _several_times(each)) is not None:
            yield run.finding(
                symptom=symptom,
                evidence=[("calls without an update before", each.repeated, 0), ("calls after updates", each.advanced)],
            )
    for each in facts.schedulers:
        symptom = _per_micro_batch(each) or _over_in_an_epoch(facts, each)
        if symptom or (run.finished and (symptom := _never_reached(facts, each))):
            is_in_loop = _per_micro_batch(each)
            yield run.finding(
                symptom=symptom,
                cause="scheduler.step() is in the loop over micro-batches, outside of the `if` that steps the "
                "optimizer: the schedule is over too early"
                if is_in_loop
                else "",
                severity="warning" if facts.exhausted is None else "critical",
                evidence=[("calls of scheduler.step()", each.calls), ("updates", facts.steps)],
                trial=RemedyTrial("another_rate", {"lr": facts.peak}),
            )


def _several_times(each: SchedulerFacts) -> str | None:
    times = each.windows[-1].calls if each.windows else 0
    if len(each.windows) >= 2 and times >= 2 and all(w.calls == w.in_a_row == times for w in each.windows):
        return f"{each.kind} advances {times} times after each update"
    if each.advanced >= 3 and abs(each.repeated - each.advanced) <= 1:
        return f"{each.kind} is stepped twice in a row, {each.repeated} times"
    if each.advanced_once >= 8 and 2 <= each.repeated <= each.advanced_once / 2:
        return f"{each.kind} is stepped after each update, and a second time after {each.repeated} of them"
    return None


def _per_micro_batch(each: SchedulerFacts) -> str:
    if not each.windows or any(w.calls < 2 or w.calls != w.backwards or w.in_a_row > 1 for w in each.windows):
        return ""
    return f"scheduler.step() is called after each of the {each.windows[-1].calls} micro-batches of a step"


def _over_in_an_epoch(facts: LearningRateFacts, each: SchedulerFacts) -> str:
    has_fallen = len(facts.lrs) > 1 and facts.lrs[-1][1] < facts.peak
    if not each.windows or facts.length is None or not has_fallen or any(w.calls != 1 for w in each.windows):
        return ""
    updates = facts.length / max(1, each.windows[-1].backwards)
    if min(map(_full_steps, each.parts), default=math.inf) >= updates:
        return ""
    (step, now), kind = facts.lrs[-1], each.kind
    return (
        f"{kind} is stepped with every update: the learning rate is {now:.3g} instead of {facts.peak:.3g} in step "
        f"{step:g}, and an epoch has {updates:g} updates"
    )


def _full_steps(part: PartFacts) -> float:
    """Returns the sum of all factors that a decaying schedule will ever give; of a passed cosine, twice its length."""
    if part.kind == "CosineAnnealingLR":  # its end is in the first half of an epoch, and the run goes on
        return 2.0 * part.T_max if part.T_max and part.last_epoch > part.T_max else math.inf
    gamma = 1.0 if part.gamma is None else part.gamma
    if not 0 <= gamma < 0.999:
        return math.inf
    if part.kind == "MultiStepLR" and part.milestones and gamma ** len(part.milestones) <= 0.1:
        return 4.0 * part.milestones[-1]  # its last milestone must be in the first quarter of an epoch to be a fault
    lengths = {"StepLR": part.step_size, "ExponentialLR": 1.0}
    return (lengths.get(part.kind) or math.inf) / (1 - gamma)


def _never_reached(facts: LearningRateFacts, each: SchedulerFacts) -> str:
    """Returns text if the schedule is as long as the run (within 10 %) but is called a quarter as often; else ""."""
    part = each.parts[0]
    length = part.total_steps or part.T_max or part.total_iters or 0
    if not (1 < each.calls <= facts.steps / 4 and 0.9 * facts.steps <= length <= 1.1 * facts.steps + 1):
        return ""
    return f"the schedule has {length:g} steps, as many as the run has updates, but was stepped {each.calls} times"
