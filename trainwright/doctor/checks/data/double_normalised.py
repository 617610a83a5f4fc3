from trainwright.doctor import Every, ExperimentRequest, Results, RunContext, check
from trainwright.doctor.facts.data import BatchFacts, InputSpread, StandardizedFacts

MAX_STD = 0.02  # Inputs with a smaller standard deviation may vary too little
MAX_STEP = 4
CONSEQUENCES = ("gradient.vanishing", "model.init_symmetric", "model.dead_relu", "optim.lr_too_low")


@check(stage="input", explains=CONSEQUENCES)
def double_normalised(run: RunContext, exams: Every[BatchFacts]) -> Results:
    """The inputs hardly vary, and the model learns several times as fast with standardized ones.

    Why it matters: samples look alike to the model, so it learns the class frequencies and stays near that loss.

    How it is detected: every input deviates by less than 0.02 around an offset. The first steps are replayed with
    standardized inputs, and the loss falls more than twice as far.

    Usual cause: the data is normalised twice: in the data set, and again in the loop or the model.

    Looks like: data.constant_input, where the deviation is exactly 0; optim.lr_too_low, where the inputs are normal.

    Fix: normalise in one place. `ToTensor()` divides by 255 already. Print `x.mean(), x.std()` before the model.

    Sources: TheDeepChecker (Ben Braiek and Khomh).
    """
    step, facts = next(iter(exams), (0, BatchFacts()))
    spreads = [each for each in facts.inputs if each.std is not None and len(each.shape) > 1 and not each.constant]
    if step > MAX_STEP or not spreads or not all(map(_is_small, spreads)):
        return
    trial = next((each for at, each in run.every(StandardizedFacts) if at == step), None)
    if trial is None:
        if not run.was_tried(StandardizedFacts):
            yield ExperimentRequest(StandardizedFacts.experiment, step)
        return
    fell = trial.unchanged[0] - trial.unchanged[-1]
    would = trial.standardized[0] - trial.standardized[-1]
    if would > 2 * fell and would > 0.03 * abs(trial.standardized[0]):
        x = spreads[0]
        yield run.finding(
            symptom=f"inputs hardly vary: deviation {x.std:.2g} around {x.mean:.3g}",
            evidence=[
                ("deviation of the inputs", x.std, 1),
                (f"fall of the loss in {len(trial.unchanged)} updates", fell, would),
            ],
        )


def _is_small(x: InputSpread) -> bool:
    std, mean = x.std or 0.0, x.mean or 0.0
    return std < MAX_STD and (abs(mean) > 5 * std or std < MAX_STD / 4)
