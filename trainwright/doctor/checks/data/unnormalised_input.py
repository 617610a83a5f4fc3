import math

from trainwright.doctor import Every, ExperimentRequest, Results, RunContext, check
from trainwright.doctor.facts.data import BatchFacts, StandardizedFacts

MIN_RMS = 10.0  # Inputs with a larger root mean square may be too large
MAX_STEP = 4  # The last step in which the scale of the loss is evidence about the inputs
CONSEQUENCES = (
    "gradient.exploding",
    "model.init_too_large",
    "model.dead_relu",
    "optim.lr_too_high",
)


@check(stage="input", explains=CONSEQUENCES)
def unnormalised_input(run: RunContext, exams: Every[BatchFacts]) -> Results:
    """The inputs are far larger than 1, and the first loss is far above chance because of it.

    Why it matters: the first layer saturates, and no learning rate suits both it and the other layers.

    How it is detected: the root mean square of an input is above 10. The first steps are replayed with standardized
    inputs, and their loss is near chance (or less than a fifth of the recorded one) while the recorded loss is not. A
    model that normalizes its inputs gains nothing and is not reported.

    Usual cause: pixels from 0 to 255, or features in their physical units, go straight into the model.

    Looks like: optim.lr_too_high, where the first loss is near chance; model.init_too_large, where the inputs are
    normal.

    Fix: `x = (x - mean) / std` with the statistics of each feature over the training set; for pixels at least
    `x.float() / 255`.

    Sources: UMLAUT (Schoop et al., CHI 2021).
    """
    step, facts = next(iter(exams), (0, BatchFacts()))
    spreads = [each for each in facts.inputs if each.std and len(each.shape) > 1]
    large = [each for each in spreads if math.hypot(each.mean or 0.0, each.std or 0.0) > MIN_RMS]
    if step > MAX_STEP or not large:
        return
    trial = next((each for at, each in run.every(StandardizedFacts) if at == step), None)
    if trial is None:
        if not run.was_tried(StandardizedFacts):
            yield ExperimentRequest(StandardizedFacts.experiment, step)
        return
    (first, *_, last), (better, *_, end) = trial.unchanged, trial.standardized
    chance = math.log(facts.classes) if facts.classes and facts.classes > 1 else None
    if chance is not None:
        is_worse = first > 1.5 * chance > better and better < 0.6 * first
    else:
        is_worse = first > 5 * abs(better) and last > 2 * abs(end)
    if is_worse:
        x = large[0]
        yield run.finding(
            symptom=f"the loss is {first:.3g} before any update" + (f", chance is {chance:.3g}" if chance else ""),
            cause=f"inputs are not normalised: mean {x.mean:.3g}, deviation {x.std:.3g}, up to {x.absmax:.3g}",
            evidence=[
                ("mean and deviation of the inputs", [x.mean, x.std], [0, 1]),
                ("first loss, unchanged and with standardized inputs", [first, better], chance),
            ],
        )
