import math

from trainwright.doctor import RemedyTrial, Results, RunContext, check
from trainwright.doctor.facts.calls import kinds

MIN_CLIPS = 16
MIN_NORM_RATIO = 100.0  # Norm / threshold in every clip
PROGRESS_FRACTION = 0.1  # If the loss falls by this fraction, training works in spite of the clipping


@check(points_at="clip", stage="clip", confidence=0.9, explains=("optim.lr_too_low",))
def clip_always_active(run: RunContext) -> Results:
    """Gradient clipping shrinks every step by a large factor, and the loss hardly falls.

    Why it matters: each update has the same tiny length, whatever the gradient is. With SGD this is a learning rate
    many times smaller.

    How it is detected: in each of at least 16 clips the norm is more than 100 times the threshold, and the loss has
    fallen by less than a tenth.

    Usual cause: the threshold is far below the usual norm, or the loss is a sum.

    Looks like: gradient.clip_before_unscale, where the norm is wrong by the loss scale;
    gradient.accumulation_not_normalised, where it is wrong by the number of micro-batches.

    Fix: log the norm that `clip_grad_norm_` returns, and use a threshold near its 90th percentile (transformers: 1.0).
    """
    clips = [(r.step, c["norm"] / max(c["at"], 1e-30)) for r in run.steps for _, c in kinds(r, "clip") if c["norm"]]
    if len(clips) < MIN_CLIPS or not all(math.isfinite(ratio) and ratio > MIN_NORM_RATIO for _, ratio in clips):
        return
    losses = [each.loss for each in run.steps]
    first, last = sum(losses[:4]) / 4, sum(losses[-4:]) / 4
    if first - last < PROGRESS_FRACTION * abs(first):
        typical = sorted(ratio for _, ratio in clips)[len(clips) // 2]
        yield run.finding(
            symptom=f"clipping makes the gradients of every step {typical:.3g} times smaller, and the loss goes "
            f"from {first:.4g} to {last:.4g} in {len(losses)} steps",
            since_step=clips[0][0],
            evidence=[("norm / threshold", typical, "around 1")],
            trial=RemedyTrial("clip_at", {"at": 1.0}),
        )
