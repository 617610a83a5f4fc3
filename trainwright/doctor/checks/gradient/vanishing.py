import math
from collections.abc import Sequence

from trainwright.doctor import Every, NotApplicable, Results, RunContext, Where, check
from trainwright.doctor.facts.layers import LayerGradient, LayersFacts

MAX_STEP_OF_SATURATION = 64  # If gradients have shrunk by this step and had not at first, the updates are the cause


@check(stage="backward", confidence=0.9, explains=("model.output_same_for_all_samples",))
def vanishing(run: RunContext, looks: Every[LayersFacts]) -> Results:
    """Gradients shrink from layer to layer: those of the first layer are at most 1e-5 of the largest.

    Why it matters: the first layers stay at their random initial values.

    How it is detected: from the gradients of at least four weight matrices right before the update, in the order in
    which their modules are called. Not in float16, in which small gradients round to 0. If the gradients shrink only
    after the first steps, but by step 64, the first updates are the cause.

    Usual cause: saturating activations (sigmoid, tanh) or small weights in a deep network without residual connections.

    Fix: ReLU or GELU instead of sigmoid and tanh; residual connections with normalization; Kaiming initialization.

    Sources: AutoTrainer (Zhang et al., ICSE 2021).
    """
    step, now = looks[-1]
    depth = now.depth
    if now.is_fp16:
        yield NotApplicable("small gradients round to 0 in float16: see precision.fp16_underflow")
        return
    if not _falls(depth):
        return
    ratio = depth[0].size / max(each.size for each in depth)
    from_start = looks[0][0] <= 4 and _falls(looks[0][1].depth)
    began = next(at for at, each in looks if _falls(each.depth))
    is_saturated = not from_start and looks[0][0] <= 4 and began <= MAX_STEP_OF_SATURATION
    yield run.finding(
        step,
        cause="the first updates were too large and have saturated the layers: the learning rate is too high, or a "
        "warm-up is missing"
        if is_saturated
        else "",
        remedy="a tenth of the learning rate, or a warm-up" if is_saturated else "",
        symptom=f"the gradient of {depth[0].module} is {ratio:.0e} of the largest one of the later layers",
        severity="critical" if from_start else "warning",
        sure=0.9 if from_start else 0.5,
        where=Where(module=depth[0].module),
        evidence=[("gradient of the first layer over the largest", ratio, 1.0)],
    )


def _falls(depth: Sequence[LayerGradient]) -> bool:
    """Returns True if gradients shrink towards the input between most pairs of layers, and by 1e-5 in total."""
    sizes = [max(each.size, 1e-320) for each in depth]
    if len(sizes) < 4 or not all(map(math.isfinite, sizes)) or sizes[len(sizes) // 2] <= 1e-300:
        return False
    pairs = [(a, b) for i, a in enumerate(sizes) for b in sizes[i + 1 :]]
    return sizes[0] <= 1e-5 * max(sizes) and sum(a < b for a, b in pairs) / len(pairs) >= 0.85
