from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.data import SplitsFacts


@check(points_at="validation", stage="input", confidence=0.9)
def validation_scaled_apart(run: RunContext, facts: SplitsFacts) -> Results:
    """The inputs of the validation have another scale than those of training.

    Why it matters: the model sees values that it was never trained on, so the validation loss says nothing about it.

    How it is detected: by the range, mean and standard deviation of the inputs of 16 training steps and 16 evaluated
    batches. Both have one of these scales, but not the same one: whole numbers from 0 to 255; fractions from 0 to 1;
    from -1 to 1; mean 0 and standard deviation 1.

    Exceptions: another evaluation has the scale of training.

    Usual cause: the transform of the validation set lacks `Normalize`, or `ToTensor`, or divides by 255 twice.

    Fix: use the same deterministic transforms (`ToTensor`, `Normalize`) for both sets; only random ones belong to
    training alone.

    Sources: JeasunLok/ResNet-pytorch#1, MichalBusta/DeepTextSpotter#19, leeyeehoo/CSRNet-pytorch#25.
    """
    if facts.scales:
        ours, theirs = facts.scales
        yield run.finding(
            symptom=f"training inputs are {ours}, validation inputs {theirs}",
            where=Where(source=facts.source),
            evidence=[("scale of the evaluated inputs", theirs, ours)],
        )
