import math

from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.data import BatchFacts

MIN_SAMPLES = 4
CONSEQUENCES = (
    "data.label_feature_misaligned",
    "gradient.vanishing",
    "model.output_same_for_all_samples",
    "optim.lr_too_low",
)


@check(stage="input", severity="critical", confidence=0.95, explains=CONSEQUENCES)
def constant_input(run: RunContext, facts: BatchFacts) -> Results:
    """All samples of the batch are equal, and their targets differ.

    Why it matters: the outputs are the same for all samples, so the model can learn nothing but the average target.

    How it is detected: the variance of every input over the batch is exactly 0.

    Exceptions: inputs of one number per sample, as passed to a model without real inputs, are reported only with -v.

    Usual cause: integer arithmetic, such as `(x / 255).to(torch.uint8)`, which is 0 almost everywhere.

    Looks like: data.unnormalised_input, where a small variance is left.

    Fix: cast before dividing, `x.float() / 255`, and print `(x[0] - x[1]).abs().max()` for a batch from the loader.
    """
    if not facts.inputs or facts.inputs[0].shape[0] < MIN_SAMPLES:
        return
    if not facts.targets_vary or not all(each.constant for each in facts.inputs):
        return
    zeros = all(each.absmax == 0.0 for each in facts.inputs)
    is_dummy = all(math.prod(each.shape[1:]) == 1 for each in facts.inputs)
    yield run.finding(
        severity="info" if is_dummy else "critical",
        symptom=f"all {facts.inputs[0].shape[0]} samples of the batch are "
        + ("zeros" if zeros else "equal")
        + ", with different targets",
        evidence=[("variance across the batch", 0.0, "> 0")],
        explains=("model.dead_relu", "model.init_symmetric"),
    )
