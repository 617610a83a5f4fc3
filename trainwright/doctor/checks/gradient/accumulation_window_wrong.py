from collections import Counter

from trainwright.doctor import NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.calls import CallsFacts, kinds

MIN_STEPS = 4
MIN_FRACTION = 0.75  # Fraction of steps that differ. The last step of an epoch may have fewer micro-batches.


@check(points_at="step", stage="backward", confidence=0.85, since_step=1)
def accumulation_window_wrong(run: RunContext, facts: CallsFacts) -> Results:
    """A step has a different number of micro-batches than it should.

    How it is detected: backward passes between updates are counted. Three quarters of the steps have a different number
    than was passed to `tw.watch(accumulation=...)`; or the first step has one and the next ones have several.

    Usual cause: `if i % n == 0: step()` steps after the first micro-batch instead of the last (`(i + 1) % n == 0`).

    Looks like: gradient.accumulation_leftover, where a window is too long.

    Fix: step where `(i + 1) % n == 0`, or at the end of the epoch; divide by the micro-batches that the window has.
    """
    seen = [each for each in run.steps if "blind" not in each.values]
    counts = {each.step: n for each in seen if (n := len(kinds(each, "backward")))}
    if len(counts) < MIN_STEPS:
        return
    declared, [(usual, _)] = facts.accumulation or 1, Counter(counts.values()).most_common(1)
    if declared == usual == 1:
        yield NotApplicable("every step has one backward pass")
        return
    other = [n for n in counts.values() if n < declared]
    later = [n for step, n in counts.items() if step > 1]
    if len(other) >= max(MIN_STEPS, MIN_FRACTION * len(counts)):
        yield run.finding(
            symptom=f"{declared} micro-batches per step are declared; {len(other)} of {len(counts)} steps "
            f"have {other[-1]}",
            evidence=[("backward passes of a step", other[-1], declared)],
        )
    elif counts.get(1) == 1 and usual >= 2 and len(later) >= 3 and set(later[:3]) == {usual}:
        yield run.finding(
            1,
            symptom=f"the first update has 1 micro-batch, and the next ones have {usual}",
            cause="the loop steps after the first micro-batch of a window instead of the last: i % n == 0",
            sure=0.8,
            evidence=[("backward passes of the first update", 1, usual)],
        )
