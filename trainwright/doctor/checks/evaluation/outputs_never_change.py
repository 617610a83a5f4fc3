from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.modes import MIN_STILL, EvaluationFacts


@check(points_at="validation", stage="loop", confidence=0.9)
def outputs_never_change(run: RunContext, facts: EvaluationFacts) -> Results:
    """Evaluations do not show what was trained: the outputs are the same as before, though the weights have moved.

    Why it matters: the reported metric is that of other weights. Early stopping and the choice of the best checkpoint
    see nothing of the training.

    How it is detected: inputs and outputs of the first batch of each evaluation are summed. In three evaluations in a
    row all sums are equal, while the optimizer has changed weights in between.

    Usual cause: the evaluated model is another object, such as a copy made before the training, an average that is
    never updated, or a new model into which the trained weights or adapters are not loaded.

    Fix: evaluate the model that is trained, or load its weights into the evaluated one before each evaluation.

    Sources: huggingface/peft#793, perslev/U-Time#43.
    """
    if facts.still >= MIN_STILL and run.steps and run.steps[-1].lr:
        yield run.finding(
            max(1, facts.after),
            symptom=f"{facts.still + 1} evaluations in a row gave the same outputs, while the trained weights moved",
            cause="the evaluated model is another one than the trained model, and its weights are never loaded, as of "
            "fresh adapters or a copy"
            if facts.is_copy
            else "",
            where=Where(source=facts.still_at),
            evidence=[("evaluations in a row with the same outputs", facts.still + 1, 1)],
        )
