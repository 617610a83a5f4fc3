from statistics import fmean

from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.calls import ResumeFacts
from trainwright.doctor.facts.loss import LossFacts
from trainwright.doctor.facts.weights import WeightsFacts

MIN_UPDATES_BEFORE = 50  # Updates that the state of the optimizer has counted, after which the model has learned
MAX_STEP = 8
MIN_RATIO = 1.1  # Loss / loss of a constant prediction, in the first steps


@check(points_at="load", stage="loop", severity="critical", confidence=0.97)
def loaded_weights_overwritten(run: RunContext, facts: ResumeFacts) -> Results:
    """Weights were loaded and then overwritten before the first step, so training starts from scratch.

    How it is detected: samples of each weight are compared right after `load_state_dict` and at the first forward call;
    weights with at least 80 % of the loaded values have changed. Or the optimizer was resumed (its state counts at
    least 50 updates), and in the first 8 steps the loss is more than a tenth above that of the best constant
    prediction.

    Exceptions: only a new head is overwritten; weights that were only cast or scaled.

    Usual cause: the model is initialized after `load_state_dict`; or only the optimizer is loaded.

    Fix: call `model.load_state_dict(...)` after every initialization, and load the model as well as the optimizer.

    Sources: huggingface/picotron#32.
    """
    gone = facts.overwritten
    if gone is not None and gone.fraction >= 0.8:
        yield run.finding(
            symptom=f"{gone.gone} of {gone.weights} loaded weights were overwritten before the first step",
            evidence=[("fraction of loaded values that were replaced", gone.fraction, 0.0)],
        )
    weights = run.latest(WeightsFacts)
    if weights is None or weights.updates_before < MIN_UPDATES_BEFORE:
        return
    for step, exam in run.every(LossFacts):
        for call in exam.given if step <= MAX_STEP else ():
            ratios = [value / constant for value, constant, _ in call.rows if constant > 0]
            if len(ratios) >= 2 and fmean(ratios) > MIN_RATIO:
                yield run.finding(
                    step,
                    symptom=f"the optimizer continues after {weights.updates_before} updates, but {call.op} begins at "
                    f"{fmean(ratios):.2g} times the loss of a constant prediction",
                    cause="the weights were initialized after the checkpoint was loaded, or were not loaded",
                    severity="warning",
                    sure=0.8,
                    since_step=1,
                    evidence=[("first losses / loss of a constant prediction", round(fmean(ratios), 3), "< 1")],
                )
