from trainwright.doctor import NotApplicable, Results, RunContext, Where, check
from trainwright.doctor.facts.data import SamplesFacts

MIN_SAMPLES = 3


@check(
    stage="label",
    confidence=0.95,
    explains=("data.label_feature_misaligned", "optim.lr_too_low"),
)
def flipped_apart(run: RunContext, facts: SamplesFacts) -> Results:
    """An image and its mask are flipped or rotated differently, so they do not match.

    Why it matters: the mask of such a sample marks the wrong pixels. The model learns to blur, and its loss stays high.

    How it is detected: images and masks of 48 samples are kept and compared when the samples are read again. Three of
    them were flipped or rotated in another way than their masks. This requires two pictures of the same height and
    width: one is an input of the model, the other an argument of the loss.

    Exceptions: symmetric images and masks, which do not show how they were rotated.

    Usual cause: the image and the target mask are augmented by separate random draws, or only one of them is augmented.

    Looks like: data.label_feature_misaligned, where inputs and labels never belong together.

    Fix: apply one random draw to both, for example to the concatenation of image and mask.

        both = flip(torch.cat([image, mask]))
        image, mask = both[:3], both[3:]

    Or give both to one call of `torchvision.transforms.v2`, the mask as a `tv_tensors.Mask`.

    Sources: Project-MONAI/MONAI#1102, keras-team/keras-preprocessing#236.
    """
    if facts.apart >= MIN_SAMPLES:
        yield run.finding(
            symptom=f"{facts.apart} of {facts.apart + facts.together} samples that were read again had their image "
            "and mask flipped or rotated differently",
            since_step=facts.since_apart,
            where=Where(source=facts.source),
            evidence=[("samples flipped differently", facts.apart, 0), ("samples flipped together", facts.together)],
        )
    elif not facts.together:
        yield NotApplicable("no sample with an image and a mask came again")
