import math

from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.calls import ScalerFacts

MIN_SCALE = 64.0
SCALED_THRESHOLD_FRACTION = 0.02
"""A threshold above this fraction of the scale was multiplied by the scale, which is correct."""


@check(
    points_at="clip",
    stage="clip",
    severity="critical",
    confidence=0.97,
    explains=(
        "gradient.clip_always_active",
        "gradient.vanishing",
        "optim.lr_too_low",
        "precision.gradients_not_unscaled",
    ),
)
def clip_before_unscale(run: RunContext, facts: ScalerFacts) -> Results:
    """Gradients are clipped before they are unscaled, while they still contain the loss scale.

    Why it matters: their norm is about 65536 times too large (the initial scale of `GradScaler`), so every step is
    clipped, and after unscaling the gradient is a tiny part of what it should be. Adam is hardly affected until
    gradients are as small as its eps.

    How it is detected: gradients of a loss scaled by 64 or more are clipped before they are unscaled, and the threshold
    is at most 2 % of the scale.

    Usual cause: `clip_grad_norm_` comes before `scaler.unscale_(optimizer)`, or that call is missing.

    Looks like: gradient.clip_always_active, where the norm is correct and the threshold is too small.

    Fix: `scaler.scale(loss).backward(); scaler.unscale_(optimizer)`, then the clip, then `scaler.step(optimizer)`.

    Sources: Pytorch-UNet#468, pytorch/examples#1196, waifu-diffusion#64.
    """
    clip = facts.scaled_clip
    if clip is None or clip.scale < MIN_SCALE or clip.at > SCALED_THRESHOLD_FRACTION * clip.scale:
        return
    true = None if clip.norm is None or not math.isfinite(clip.norm) else clip.norm / clip.scale
    yield run.finding(
        symptom=f"gradients are clipped to {clip.at:g} while they are {clip.scale:g} times too large",
        evidence=[("norm before the clip", clip.norm, true), ("clips like this", facts.scaled_clips, 0)],
    )
