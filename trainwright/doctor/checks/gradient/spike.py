import statistics

from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.calls import kinds

ACTION_TEXTS = {
    "warn": "the update was made",
    "skip": "the update was skipped",
    "rollback": "an earlier state was restored",
}


@check(names_cause=False, stage="backward", confidence=0.6)
def spike(run: RunContext) -> Results:
    """The gradient norm of a step is many times the usual one, and larger than at the start of the run.

    How it is detected: the norm is more than 8 times the median of the last 64 steps and at least 6 standard deviations
    above it, but not in the first 16 steps.

    Exceptions: reported only with -v if the gradient was clipped, or if the loss has returned to its earlier level.

    Usual cause: a batch that is unlike the others, a learning rate that was raised, or a steep region of the loss.

    Fix: examine the samples of this step. Clip the gradient norm, or skip such updates: `on_spike="skip"` in
    `tw.watch`, `spikes.policy: skip` in a recipe.
    """
    spikes = [each for each in run.steps if (seen := each.values.get("spike") or ()) and seen[0] > seen[2]]
    if not spikes:
        return
    first = spikes[0]
    norm, usual, _, action = first.values["spike"]
    is_clipped = any(clip["at"] < norm for _, clip in kinds(first, "clip"))
    yield run.finding(
        first.step,
        symptom=f"the gradient norm is {norm:.3g}, {norm / usual:.0f} times the usual one",
        remedy='examine the samples of this step, or skip such updates: `on_spike="skip"`' if is_clipped else "",
        severity="info" if action == "warn" and (is_clipped or _went_on_well(run, first.step)) else "warning",
        since_step=first.step,
        evidence=[
            ("gradient norm before clipping", norm, usual),
            ("steps like this", len(spikes), 0),
            ("what was done", ACTION_TEXTS.get(action, action)),
        ],
    )


def _went_on_well(run: RunContext, step: int) -> bool:
    """Returns True if the loss, soon afterwards or by now, is at most the highest of the 16 steps before."""
    before = [each.loss for each in run.steps if step - 16 <= each.step < step]
    after = [each.loss for each in run.steps if step < each.step]
    soon = [each.loss for each in run.steps if step < each.step <= step + 8]
    return bool(soon and before) and min(statistics.median(soon), statistics.median(after[-8:])) <= max(before)
