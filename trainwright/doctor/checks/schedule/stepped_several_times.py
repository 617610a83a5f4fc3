from trainwright.doctor import NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.schedule import LearningRateFacts, SchedulerFacts


@check(
    points_at="schedule",
    stage="loop",
    confidence=0.9,
    explains=("schedule.unit_mismatch", "schedule.learning_rate_zero", "optim.lr_too_low"),
)
def stepped_several_times(run: RunContext, facts: LearningRateFacts) -> Results:
    """`scheduler.step()` is called several times for one update.

    Why it matters: the schedule runs that many times too fast. On 8 ranks the decay is over after an eighth of the run.

    How it is detected: the same number of calls in a row after each update; or calls without an update before them:
    about as many as calls after an update, or at least two in addition to at least eight calls that follow one update
    each.

    Usual cause: a scheduler that `accelerate` prepared, which steps once for each rank; a call for each step and
    another for each epoch; a duplicated call.

    Looks like: schedule.unit_mismatch, where a call follows each micro-batch.

    Fix: call `scheduler.step()` in one place, once for each update or epoch. With accelerate, do not prepare the
    scheduler, or give it `num_training_steps * num_processes`.

    Sources: accelerate#2926, huggingface/transformers#24088, EasyContext#21.
    """
    if not facts.schedulers:
        yield NotApplicable("no scheduler is known")
        return
    for each in facts.schedulers:
        if (symptom := _symptom(each)) is not None:
            yield run.finding(
                symptom=symptom,
                evidence=[("calls without an update before", each.repeated, 0), ("calls after updates", each.advanced)],
            )


def _symptom(each: SchedulerFacts) -> str | None:
    times = each.windows[-1].calls if each.windows else 0
    if len(each.windows) >= 2 and times >= 2 and all(w.calls == w.in_a_row == times for w in each.windows):
        return f"{each.kind} advances {times} times after each update"
    if each.advanced >= 3 and abs(each.repeated - each.advanced) <= 1:
        return f"{each.kind} is stepped twice in a row, {each.repeated} times"
    if each.advanced_once >= 8 and 2 <= each.repeated <= each.advanced_once / 2:
        return f"{each.kind} is stepped after each update, and {each.repeated} times once more"
    return None
