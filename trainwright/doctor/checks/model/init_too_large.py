import math

from trainwright.doctor import Every, Results, RunContext, Where, check, listed
from trainwright.doctor.facts.layers import FirstLossFacts


@check(
    points_at=("initialization", "construction"),
    stage="forward",
    confidence=0.9,
    explains=("optim.lr_too_high", "gradient.exploding"),
)
def init_too_large(run: RunContext, exams: Every[FirstLossFacts]) -> Results:
    """Initial weights are far too large: the first loss is many times that of chance.

    How it is detected: in the first four steps the loss is at least 1.5 ln(classes) + 0.5. In a replay, large weights
    are divided by their gain (the standard deviation times the root of the fan-in), which removes at least 70 % of the
    excess over ln(classes).

    Exceptions: inputs that are large themselves (root mean square above 10).

    Usual cause: `nn.init.normal_` without `std=`, which is 1.0 by default.

    Looks like: data.unnormalised_input, where the weights are normal.

    Fix: `nn.init.kaiming_normal_(weight)` for ReLU, `nn.init.normal_(weight, std=0.02)` in transformers.

    Sources: BigScience notes on the 104B model; Glorot and Bengio 2010.
    """
    step, facts = exams[-1]
    if step > 4 or not facts.large or facts.classes < 2 or facts.input_size > 10:
        return
    chance, loss = math.log(facts.classes), facts.loss
    if not loss >= 1.5 * chance + 0.5 or not facts.rescaled <= chance + 0.3 * (loss - chance) or math.isinf(loss):
        return
    names = sorted(facts.large, key=facts.large.__getitem__, reverse=True)
    yield run.finding(
        step,
        symptom=f"the first loss is {loss:.3g}, chance is {chance:.3g}; weights are up to {facts.large[names[0]]:.1f} "
        f"times the usual size: {listed(names)}",
        severity="critical" if loss > 3 * chance else "warning",
        where=Where(module=names[0].rpartition(".")[0]),
        evidence=[("first loss", loss, chance), ("with weights of the usual size", facts.rescaled, chance)],
    )
