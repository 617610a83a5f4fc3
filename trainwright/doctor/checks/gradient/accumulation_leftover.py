from collections import Counter

from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.calls import CallsFacts, kinds


@check(points_at="step", stage="backward", confidence=0.95)
def accumulation_leftover(run: RunContext, facts: CallsFacts) -> Results:
    """The last, short window of an epoch is added to the first window of the next one.

    Why it matters: one update in each epoch mixes gradients of old weights with new ones, and is too large.

    How it is detected: an update during which an epoch ended has a full window of backward passes and those from
    before.

    Exceptions: windows that run on across epochs (they have the usual length), and windows of changing length.

    Usual cause: the number of batches is no multiple of the accumulation, and nothing steps at the end of the epoch.

    Looks like: optim.missing_zero_grad, which does it in every step.

    Fix: step at the end of an epoch, too (divided by what the window has), or drop what is left over.
    """
    counts = {record.step: len(kinds(record, "backward")) for record in run.steps}
    if not facts.split_windows or not counts:
        return
    usual, times = Counter(counts.values()).most_common(1)[0]
    split = {step for step, _, _ in facts.split_windows}
    odd = sum(count != usual for step, count in counts.items() if step not in split)
    for step, before, total in facts.split_windows if odd <= len(split) else ():
        if usual >= 2 and times >= 3 and total == usual + before and before < usual:
            yield run.finding(
                step,
                symptom=f"the update of step {step} has {total} micro-batches in it, not {usual}",
                evidence=[("backward passes in the window", total, usual)],
            )
