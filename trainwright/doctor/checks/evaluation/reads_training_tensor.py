from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.modes import EvaluationFacts


@check(points_at="validation", stage="loop", confidence=0.9)
def reads_training_tensor(run: RunContext, exams: Every[EvaluationFacts]) -> Results:
    """An evaluation uses a tensor that a training step has left, the same for every batch.

    Why it matters: the reported loss or metric is, in part, that of the last training batch.

    How it is detected: after two or more passes of one evaluation, each without gradients, the loop reads the same
    tensor, and it has the autograd graph of a training pass.

    Usual cause: a variable is not assigned in the validation loop, so it still has its value from the training loop:
    `loss`, or an output that is unpacked into `_`.

    Fix: assign it from the outputs of the validation batch; put evaluation into a function of its own, so that a
    missing assignment is an error.

    Sources: metatensor/metatrain#160, Project-MONAI/tutorials#2000.
    """
    for _, facts in exams:
        if facts.stale > 1:
            yield run.finding(
                max(1, facts.after),
                symptom=f"after {facts.stale} passes of an evaluation the same tensor of the training was read",
                where=Where(source=facts.stale_at),
                evidence=[("passes after which it was read", facts.stale, 0)],
            )
