from collections import Counter

from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.calls import CallsFacts, kinds


@check(points_at="step", stage="backward", confidence=0.95)
def accumulation_leftover(run: RunContext, facts: CallsFacts) -> Results:
    """The last, short window of an epoch is added to the first window of the next one.

    Why it matters: one update in each epoch mixes gradients of old weights with new ones, and is too large.

    How it is detected: the first update of an epoch contains a full window of backward passes, plus those left over
    from the epoch before.

    Exceptions: windows that run on across epochs (they have the usual length), and windows of changing length.

    Usual cause: the number of batches is not a multiple of the accumulation, and nothing steps at the end of the epoch.

    Looks like: optim.missing_zero_grad, where this happens in every step.

    Fix: also step at the end of an epoch (divide by the number of micro-batches in the window), or drop the gradients
    that are left over.
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
