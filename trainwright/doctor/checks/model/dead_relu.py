from trainwright.doctor import Every, Results, RunContext, Where, check, in_words
from trainwright.doctor.facts.layers import LayersFacts, ReluFacts
from trainwright.doctor.trend import MAX_FALLING_SLOPE, slope_in_errors

MIN_DEAD_FRACTION = 0.4  # Fraction of dead units that is a fault
NO_RELU = ReluFacts(dead=0.0, varies=1.0, rows=0, furthest=0.0)


@check(
    stage="forward",
    confidence=0.9,
    explains=("gradient.vanishing", "model.output_same_for_all_samples"),
)
def dead_relu(run: RunContext, looks: Every[LayersFacts]) -> Results:
    """Many units of a ReLU are 0 for every sample.

    Why it matters: a unit that is never active has no gradient, so it cannot come back.

    How it is detected: by the inputs of every ReLU in a few steps. In at least 40 % of its units, all inputs are
    negative, and their mean is more than four standard deviations below 0, both by the measured deviation and by the
    one that the weights predict.

    Exceptions: reported only with -v if less than 90 % of the units are dead, they were alive at the start, and the
    loss has fallen since they died.

    Usual cause: biases far below 0, or updates that have driven the inputs there: a learning rate that is too high.

    Fix: bias 0 at the start, a smaller learning rate, `nn.LeakyReLU(0.01)`, or a normalization before it.

    Sources: AutoTrainer (Zhang et al., ICSE 2021).
    """
    step, now = looks[-1]
    path, seen = max(now.relus.items(), key=lambda item: item[1].dead, default=("", NO_RELU))
    if seen.dead < MIN_DEAD_FRACTION or seen.varies < 0.9 or seen.rows < 16:
        return
    alive = [at for at, each in looks if each.relus.get(path, NO_RELU).dead < MIN_DEAD_FRACTION]
    from_start = looks[0][0] not in alive
    losses = [(each.step, each.loss) for each in run.steps if each.step > max(alive, default=0)]
    harmless = seen.dead < 0.9 and not from_start and slope_in_errors(losses) < MAX_FALLING_SLOPE
    yield run.finding(
        step,
        symptom=f"{seen.dead:.0%} of the units of {in_words(path)} are 0 for every sample",
        severity="critical" if seen.dead >= 0.9 and from_start else "info" if harmless else "warning",
        sure=0.9 if from_start else 0.6,
        where=Where(module=path, op="relu"),
        evidence=[("fraction of dead units", seen.dead, 0.0), ("lowest mean input", seen.furthest, 0.0)],
    )
