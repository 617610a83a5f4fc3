from trainwright.doctor import RemedyTrial, Results, RunContext, Where, check, listed
from trainwright.doctor.facts.precision import MixedPrecisionFacts

MIN_UPDATES = 4
MIN_UPDATES_OF_A_TENSOR = 16
MIN_UPDATES_AT_ONE_RATE = 2  # A constant rate is no warm-up, whose first updates may be lost
MIN_UNCHANGED_FRACTION = 0.5  # Median over the updates of the fraction of weights that stay unchanged


@check(stage="update", confidence=0.95, explains=("optim.lr_too_low",), since_step=1)
def lost_updates(run: RunContext, facts: MixedPrecisionFacts) -> Results:
    """Updates are smaller than half of the last digit of a 16-bit weight, so the weight does not change.

    Why it matters: an update below about 0.2 % of a bfloat16 weight is lost. At a learning rate of 1e-5 that is most of
    them, and the loss stalls early.

    How it is detected: a sample of the 16-bit weights is compared before and after updates at a learning rate of at
    least half of the highest one. In the median of four updates, half of the weights with a gradient do not change. Two
    updates are enough if both have the same learning rate, because the first updates of a warm-up may be lost. Or at
    least 95 % of the weights of one tensor have gradients, but still have their initial values after 16 updates.

    Exceptions: optimizers that keep float32 copies or rounding errors, or that round stochastically.

    Usual cause: `model.bfloat16()` with a plain optimizer. Weights of normalizations, which begin at 1, stop first.

    Looks like: optim.lr_too_low, where float32 weights hardly move either.

    Fix: weights in float32 and computation under `torch.autocast("cuda", dtype=torch.bfloat16)`; or an optimizer with
    float32 copies, Kahan summation or stochastic rounding.

    Sources: torchao #1124, torchtune #2254.
    """
    enough = MIN_UPDATES_AT_ONE_RATE if facts.is_constant_rate else MIN_UPDATES
    if facts.kept_elsewhere or facts.updates < enough:
        return
    if facts.still < MIN_UNCHANGED_FRACTION:
        if facts.updates >= MIN_UPDATES_OF_A_TENSOR and (names := facts.never_moved):
            yield run.finding(
                symptom=f"{listed(names)} have gradients but are unchanged after {facts.updates} updates: each is "
                "lost by rounding",
                where=Where(module=names[0].rpartition(".")[0]),
                evidence=[("tensors that no update changes", len(names), 0)],
                trial=RemedyTrial("fp32_weights"),
            )
        return
    yield run.finding(
        symptom=f"an update leaves {facts.still:.0%} of the weights that have a gradient unchanged",
        severity="critical" if facts.still >= 0.9 else None,
        evidence=[("fraction of weights that an update does not change", round(facts.still, 4), "< 0.2")],
        trial=RemedyTrial("fp32_weights"),
    )
