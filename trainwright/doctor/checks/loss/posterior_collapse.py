from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.loss import LossFacts, explains_little, over_most_steps, sign_of

MIN_STEPS = 40
MIN_ROWS = 4  # Minimum number of measured steps among the last ones
MIN_RATIO = 16.0  # Weight of the divergence, relative to its weight in the variational bound


@check(stage="loss", confidence=0.9, since_step=1, explains=("loss.no_better_than_constant",))
def posterior_collapse(run: RunContext, exams: Every[LossFacts]) -> Results:
    """The reconstruction is averaged over the elements of a sample, but the KL divergence is summed and dominates.

    Why it matters: if a sample has n elements, the divergence has n times its correct weight. The posterior collapses
    to the prior, and the decoder returns the mean of the data.

    How it is detected: one term of the loss is the difference to the model's own input, averaged over all elements.
    Another term is a sum over features. After 40 steps the reconstruction is hardly better than a constant output.

    Exceptions: a small weight of the divergence, of about 1 / number of elements.

    Usual cause: `mse_loss(x_hat, x)` averages over samples and elements, the divergence is a sum over the latent code.

    Looks like: loss.term_dominates, where both terms are means and their weights are chosen badly.

    Fix: `F.mse_loss(x_hat, x, reduction="sum") / len(x)`, or divide the divergence by the number of elements.

    Sources: keras-team/keras PR 3383, zdebruine/MMVAE PR 19.
    """
    sign = sign_of(exams, "features_summed_and_averaged")
    facts = over_most_steps(exams)
    if sign is None or sign.value < MIN_RATIO or run.last_step < MIN_STEPS:
        return
    averaged = [each for each in facts.given if each.op == sign.op and len(each.rows) >= MIN_ROWS]
    if averaged and all(map(explains_little, averaged)):
        value, constant, _ = averaged[0].rows[-1]
        yield run.finding(
            symptom=f"after {run.last_step} steps {sign.op} is {value:.4g}, and {constant:.4g} for a constant output; "
            f"the other term of the loss weighs {sign.value:.0f} times as much as in the variational bound",
            where=Where(op=sign.op, source=averaged[0].line),
            evidence=[("weight of the divergence, relative to the bound", round(sign.value, 1), "about 1")],
        )
