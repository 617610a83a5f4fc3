from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.calls import ResumeFacts


@check(points_at="load", stage="loop", severity="critical", confidence=0.97)
def loaded_weights_overwritten(run: RunContext, facts: ResumeFacts) -> Results:
    """Weights were loaded and then overwritten before the first step, so training starts from scratch.

    How it is detected: samples of each weight right after `load_state_dict`, and at the first forward call.

    Exceptions: only a new head is overwritten; weights that were only cast or scaled.

    Usual cause: the model is initialised after `load_state_dict`.

    Fix: initialise first, `load_state_dict` last.
    """
    gone = facts.overwritten
    if gone is not None and gone.fraction >= 0.8:
        yield run.finding(
            symptom=f"{gone.gone} of {gone.weights} loaded weights were overwritten before the first step",
            evidence=[("fraction of loaded values that were replaced", gone.fraction, 0.0)],
        )
