from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.loss import LossFacts, sign_of


@check(stage="loss", confidence=0.9, since_step=1)
def variance_as_deviation(run: RunContext, exams: Every[LossFacts]) -> Results:
    """The noise of a VAE is scaled by the variance instead of the standard deviation.

    Why it matters: the latent code is sampled from another distribution than the divergence measures.

    How it is detected: in the graph of the loss of at least 3 steps, `exp(a)` multiplies normal noise, and `exp(a)` of
    the same `a` is added or subtracted, as in the divergence `1 + a - mean ** 2 - exp(a)`.

    Exceptions: `exp(0.5 * a)` as the factor of the noise, or `exp(2 * a)` in the divergence.

    Usual cause: `std = logvar.exp()`, which is the variance.

    Fix: `std = torch.exp(0.5 * logvar)`, the square root of the variance.

    Sources: rachtsingh/ibp_vae#3, rishikksh20/vae_tacotron2#3.
    """
    if (sign := sign_of(exams, "variance_is_deviation")) is not None:
        yield run.finding(
            symptom="exp(a) is the standard deviation of the noise, and a variance in the loss",
            where=Where(op="exp", source=sign.line),
            evidence=[("examined steps in which it is both", sign.steps, 0)],
        )
