from trainwright.doctor import NotApplicable, Results, RunContext, Where, check
from trainwright.doctor.facts.data import LoadersFacts

MIN_DRAWS_PER_SAMPLE = 32  # Mean draws of each drawn sample after which the others would have been drawn, too
MIN_DRAWS = 256
MAX_UNUSED_FRACTION = 0.05  # Fraction of the dataset that may be left out


@check(points_at=("sampler", "loader"), stage="input", confidence=0.85)
def samples_never_drawn(run: RunContext, facts: LoadersFacts) -> Results:
    """Only a few samples of the data set are drawn, again and again, and the others never.

    How it is detected: by the sample ids that the sampler returns. More than 5 % of the data set was never drawn,
    although each drawn sample was drawn 32 times on average, or two epochs drew the same samples.

    Exceptions: samplers that are made for a part of the data set, such as SubsetRandomSampler.

    Usual cause: WeightedRandomSampler has one weight per class instead of one per sample, so it draws only the first
    few rows; or each epoch ends early and the loader does not shuffle.

    Fix: one weight for each sample: `WeightedRandomSampler(class_weights[labels], num_samples=len(labels))`. Train on
    the full epoch.

    Sources: deep-voice/soundbay PR 49.
    """
    drawn = [each for each in facts.drawn if each.samples and not each.chooses and each.sampler != "NoneType"]
    if not drawn:
        yield NotApplicable("no loader draws samples by their numbers from all of a data set")
        return
    for each in drawn:
        left = each.samples - each.distinct
        is_few = each.draws >= max(MIN_DRAWS, MIN_DRAWS_PER_SAMPLE * each.distinct)
        if left > MAX_UNUSED_FRACTION * each.samples and (is_few or each.same_set):
            yield run.finding(
                symptom=f"only {each.distinct} of {each.samples} samples were drawn in {each.draws} draws",
                where=Where(source=facts.source),
                evidence=[("different samples drawn", each.distinct, each.samples), ("sampler", each.sampler)],
            )
