from trainwright.doctor import Results, RunContext, Where, check, listed
from trainwright.doctor.facts.precision import SeenNonfinite, TraceFacts
from trainwright.doctor.nonfinite import CONSEQUENCES, traced_at


@check(points_at="clip", stage="clip", severity="critical", confidence=0.9, explains=CONSEQUENCES)
def clip_spreads_nan(run: RunContext) -> Results:
    """Clipping makes all gradients NaN, because one of them was: each is divided by a total norm that is NaN.

    How it is detected: a step has gradients that are not finite, and after clipping there are more of them.

    Usual cause: the loop or a hook writes NaN or infinity into a gradient after the backward pass, or the value arose
    earlier, and another finding names its origin.

    Fix: `clip_grad_norm_(params, 1.0, error_if_nonfinite=True)`, or `if torch.isfinite(norm): optimizer.step()`. Then
    find the code that makes the first bad gradient.

    Sources: pytorch/pytorch #46849, habitat-lab #2226.
    """
    for step, seen in run.every(SeenNonfinite):
        if seen.num_after_clip is None or not 0 < seen.num_gradients < seen.num_after_clip:
            continue
        trace = traced_at(run, step)
        came = "the replay of the step is finite, so the loop or a hook wrote it after the backward pass"
        if not isinstance(trace, TraceFacts):
            came = "its origin is not known: the step was not replayed"
        elif trace.first:
            came = "another finding says where it began"
        yield run.finding(
            step,
            symptom=f"clipping made {seen.num_after_clip} gradients non-finite in step {step}",
            cause=f"not finite before the clip: gradients of {listed(seen.gradients)} and thus the total norm; {came}",
            where=Where(module=seen.gradients[0].rpartition(".")[0], dtype=seen.dtype),
            evidence=[
                ("non-finite gradients before clipping", seen.num_gradients, 0),
                ("non-finite gradients after clipping", seen.num_after_clip, 0),
            ],
        )
