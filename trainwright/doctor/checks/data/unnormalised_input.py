import math

from trainwright.doctor import Every, ExperimentRequest, Results, RunContext, check
from trainwright.doctor.facts.data import BatchFacts, InputSpread, StandardizedFacts

MIN_RMS = 10.0  # Inputs with a larger root mean square may be too large
MAX_STD = 0.02  # Inputs with a smaller standard deviation may vary too little
MAX_STEP = 4  # The last step in which the scale of the loss is evidence about the inputs
CONSEQUENCES = (
    "gradient.exploding",
    "gradient.vanishing",
    "model.init_symmetric",
    "model.init_too_large",
    "model.dead_relu",
    "optim.lr_too_high",
    "optim.lr_too_low",
)


@check(stage="input", explains=CONSEQUENCES)
def unnormalised_input(run: RunContext, exams: Every[BatchFacts]) -> Results:
    """The inputs are not normalized: they are far larger than 1, or hardly vary, and the model does better with
    standardized ones.

    Why it matters: large inputs saturate the first layer, and no learning rate suits both it and the other layers.
    Inputs that hardly vary look alike to the model, so its loss stays near that of predicting the class frequencies.

    How it is detected: the root mean square of an input is above 10, or the standard deviation of every input is below
    0.02 and below a fifth of its mean (or below 0.005). The first steps are replayed with standardized inputs. For
    large inputs, the replayed loss is near chance and the recorded loss is not; if chance is unknown, the replayed loss
    is less than a fifth of the recorded loss. For inputs that hardly vary, the replayed loss falls more than twice as
    far as with unchanged inputs. A model that normalizes its inputs is not reported.

    Usual cause: pixels from 0 to 255, or features in their physical units, are not scaled; or the data is normalized
    twice, in the data set and again in the loop or the model.

    Looks like: optim.lr_too_high, where the first loss is near chance; model.init_too_large and optim.lr_too_low, where
    the inputs are normal; data.constant_input, where the deviation is exactly 0.

    Fix: normalize once: `x = (x - mean) / std` with the statistics of each feature over the training set. For pixels,
    `x.float() / 255` is enough, which `ToTensor()` already does. Print `x.mean(), x.std()` before the model.

    Sources: UMLAUT (Schoop et al., CHI 2021); TheDeepChecker (Ben Braiek and Khomh).
    """
    step, facts = next(iter(exams), (0, BatchFacts()))
    spreads = [each for each in facts.inputs if each.std and len(each.shape) > 1 and not each.constant]
    large = [each for each in spreads if math.hypot(each.mean or 0.0, each.std or 0.0) > MIN_RMS]
    if step > MAX_STEP or not (large or (spreads and all(map(_is_small, spreads)))):
        return
    trial = next((each for at, each in run.every(StandardizedFacts) if at == step), None)
    if trial is None:
        if not run.was_tried(StandardizedFacts):
            yield ExperimentRequest(StandardizedFacts.experiment, step)
        return
    (first, *_, last), (better, *_, end) = trial.unchanged, trial.standardized
    x = (large or spreads)[0]
    if not large:
        fell, would = first - last, better - end
        if would > 2 * fell and would > 0.03 * abs(better):
            yield run.finding(
                symptom=f"inputs hardly vary: standard deviation {x.std:.2g} around {x.mean:.3g}",
                cause="the data is normalized twice: in the data set, and again in the loop or the model",
                evidence=[
                    ("deviation of the inputs", x.std, 1),
                    (f"fall of the loss in {len(trial.unchanged)} updates", fell, would),
                ],
            )
        return
    chance = math.log(facts.classes) if facts.classes and facts.classes > 1 else None
    if chance is not None:
        is_worse = first > 1.5 * chance > better and better < 0.6 * first
    else:
        is_worse = first > 5 * abs(better) and last > 2 * abs(end)
    if is_worse:
        yield run.finding(
            symptom=f"the loss is {first:.3g} before any update" + (f", chance is {chance:.3g}" if chance else ""),
            cause=f"inputs are not normalized: mean {x.mean:.3g}, deviation {x.std:.3g}, up to {x.absmax:.3g}",
            evidence=[
                ("mean and deviation of the inputs", [x.mean, x.std], [0, 1]),
                ("first loss, unchanged and with standardized inputs", [first, better], chance),
            ],
        )


def _is_small(x: InputSpread) -> bool:
    std, mean = x.std or 0.0, x.mean or 0.0
    return std < MAX_STD and (abs(mean) > 5 * std or std < MAX_STD / 4)
