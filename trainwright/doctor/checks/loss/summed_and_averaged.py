from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.loss import LossFacts, knows_nothing, over_most_steps

MIN_STEPS = 60
MIN_SEEN = 3  # Steps with such a loss
MIN_ROWS = 4  # Examined steps among the last ones


@check(stage="loss", confidence=0.9, since_step=1, explains=("loss.no_better_than_constant",))
def summed_and_averaged(run: RunContext, exams: Every[LossFacts]) -> Results:
    """One term of the loss is summed over the samples and another one is averaged, which is not learned.

    Why it matters: the ratio of the terms grows with the batch size and the number of pixels. In a VAE the KL
    divergence outweighs the reconstruction: the posterior collapses, and the latent code is ignored.

    How it is detected: the loss adds a sum and a mean over the same number of samples, with weights within a factor of
    four. After 60 steps the averaged term is no better than a constant prediction.

    Exceptions: a sum that is divided by the number of samples, or that has a small weight.

    Usual cause: the reduction of the terms differs: `mse_loss(x, y)` averages the reconstruction, and `.sum()` of the
    divergence does not.

    Looks like: loss.term_dominates, where the weights of the terms are chosen badly.

    Fix: reduce all terms alike: sum each over its features and average over the samples.

        reconstruction = F.mse_loss(output, x, reduction="sum") / len(x)
        divergence = divergence.sum() / len(x)

    Sources: zdebruine/MMVAE#19, AppliedDataSciencePartners/WorldModels#12.
    """
    facts = over_most_steps(exams)
    mixed = next((each for each in facts.signs if each.kind == "summed_and_averaged" and each.steps >= MIN_SEEN), None)
    if mixed is None or run.last_step < MIN_STEPS:
        return
    averaged = [each for each in facts.given if each.op == mixed.op and len(each.rows) >= MIN_ROWS]
    if averaged and all(map(knows_nothing, averaged)):
        value, constant, _ = averaged[0].rows[-1]
        yield run.finding(
            symptom=f"{mixed.op} averages over the samples, the other term of the loss sums over them; after "
            f"{run.last_step} steps {mixed.op} is {value:.4g}, and a constant prediction has {constant:.4g}",
            where=Where(source=mixed.line),
            evidence=[("loss of the averaged term", value), ("loss of a constant prediction", constant)],
        )
