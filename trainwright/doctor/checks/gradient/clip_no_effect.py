import math

from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.calls import has_closure, kinds
from trainwright.runs.records import Watched


@check(points_at="clip", stage="clip", confidence=0.95)
def clip_no_effect(run: RunContext) -> Results:
    """Gradient clipping has no effect: updates are made with gradients above the threshold.

    How it is detected: every clip comes after `step()` or before there are gradients, and the norm at the update is
    above the threshold; or a clip gets no parameters.

    Usual cause: the clip comes after `step()` or before `backward()`; or it gets an iterator that is used up: `filter`,
    `map` and the result of `parameters()` can be iterated only once.

    Fix: call `clip_grad_norm_(model.parameters(), max_norm)` between the last `backward()` and `step()`. Pass a new
    `model.parameters()` or a list.

    Sources: nano-world-model PR 22.
    """
    idle: list[tuple[Watched, float]] = []
    empty: list[Watched] = []
    for step in run.steps:
        clips = [value for _, value in kinds(step, "clip")]
        if clips and (has_closure(step) or _clips_in_time(step)):
            return
        if clips:
            idle.append((step, min(clip["at"] for clip in clips)))
            if any(clip["parameters"] == 0 for clip in clips) and (step.values.get("grads") or [1])[0]:
                empty.append(step)
    over = [(step, at) for step, at in idle if step.grad_norm > 1.01 * at or step in empty]
    if not over:
        return
    step, at = over[-1]
    order = " ".join(kind for kind, _ in kinds(step, "backward", "clip", "step", "zero_grad"))
    yield run.finding(
        step.step,
        symptom=f"clip_grad_norm_ with max_norm {at:g} gets no parameters"
        if step in empty
        else f"updates are made with gradients of norm {step.grad_norm:.3g}, though they are clipped at {at:g}",
        cause="its iterator, such as the result of `parameters()` or `filter`, is used up" if step in empty else "",
        since_step=over[0][0].step,
        evidence=[("order of the calls", order), ("norm at the update", step.grad_norm, at)],
    )


def _clips_in_time(step: Watched) -> bool:
    """Returns True if a clip follows a backward pass, precedes the update, and has gradients to change."""
    clipped = had_backward = False
    for kind, value in step.events:
        if kind == "backward":
            had_backward, clipped = True, False
        elif kind == "clip" and value["parameters"]:
            found = value["norm"] is None or value["norm"] > 0 or step.grad_norm == 0.0
            clipped = clipped or (had_backward and found) or not math.isfinite(value["at"])
        elif kind in ("step", "scaler_skipped"):
            if clipped:
                return True
            had_backward = False
    return clipped
