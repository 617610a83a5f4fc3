from collections import Counter

from trainwright.doctor import NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.calls import CallsFacts, kinds
from trainwright.runs.records import Watched

MIN_STEPS = 4
MIN_FRACTION = 0.75  # Fraction of steps with too few micro-batches. The last step of an epoch may have fewer.


@check(points_at="step", stage="backward", confidence=0.9)
def accumulation_window_wrong(run: RunContext, facts: CallsFacts) -> Results:
    """An update accumulates the wrong number of micro-batches.

    Why it matters: the update is too large or too small, and its gradient is divided by another number than was summed.

    How it is detected: backward passes between updates are counted. At least three quarters of the steps have fewer
    than was passed to `tw.watch(accumulation=...)`; or the first update has one backward pass and the next ones have
    several; or the first update of an epoch also contains the micro-batches left over from the previous epoch.

    Exceptions: steps that continue across epochs with the usual number, numbers that change during the run, and
    gradients of another loss that are cleared before this backward pass, such as the actor's in the critic.

    Usual cause: `if i % n == 0: step()` steps after the first micro-batch instead of the last; or the number of batches
    is not a multiple of the accumulation, and nothing steps at the end of the epoch.

    Looks like: optim.missing_zero_grad, where gradients are left over in every step.

    Fix: step where `(i + 1) % n == 0` and at the end of the epoch; divide by the number of micro-batches in the step.
    """
    seen = [each for each in run.steps if "blind" not in each.values]
    counts = {each.step: n for each in seen if (n := len(kinds(each, "backward")))}
    if len(counts) < MIN_STEPS:
        return
    declared, [(usual, times)] = facts.accumulation or 1, Counter(counts.values()).most_common(1)
    if declared == usual == 1:
        yield NotApplicable("every step has one backward pass")
        return
    split = {step for step, _, _ in facts.split_windows}
    odd = sum(count != usual for step, count in counts.items() if step not in split)
    for step, before, total in facts.split_windows if odd <= len(split) else ():
        if usual >= 2 and times >= 3 and total == usual + before and before < usual:
            yield run.finding(
                step,
                symptom=f"the update of step {step} has {total} micro-batches, not {usual}",
                cause="micro-batches left over at the end of an epoch are added to the first update of the next one",
                sure=0.95,
                evidence=[("backward passes of this update", total, usual)],
            )
    other = [n for n in counts.values() if n < declared]
    later = [n for step, n in counts.items() if step > 1]
    if len(other) >= max(MIN_STEPS, MIN_FRACTION * len(counts)):
        yield run.finding(
            symptom=f"{declared} micro-batches per step are declared; {len(other)} of {len(counts)} steps "
            f"have {other[-1]}",
            since_step=1,
            evidence=[("backward passes of a step", other[-1], declared)],
        )
    elif (
        counts.get(1) == 1
        and usual >= 2
        and len(later) >= 3
        and set(later[:3]) == {usual}
        and not any(map(_clears_between, seen))
    ):
        yield run.finding(
            1,
            symptom=f"the first update has 1 micro-batch, and the next ones have {usual}",
            cause="the loop steps after the first micro-batch instead of after the last: i % n == 0",
            sure=0.8,
            since_step=1,
            evidence=[("backward passes of the first update", 1, usual)],
        )


def _clears_between(step: Watched) -> bool:
    """Returns True if gradients are cleared between two backward passes: those before are of another loss."""
    order = [kind for kind, _ in kinds(step, "backward", "zero_grad")]
    return ("backward", "zero_grad", "backward") in zip(order, order[1:], order[2:])
