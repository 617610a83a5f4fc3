from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.loss import CONSEQUENCES_OF_WRONG_ARGUMENTS, LossFacts


@check(stage="loss", severity="critical", confidence=0.97, explains=("model.*", *CONSEQUENCES_OF_WRONG_ARGUMENTS))
def broadcast_target(run: RunContext, exams: Every[LossFacts]) -> Results:
    """Predictions and targets have different shapes and broadcast, so each prediction is compared with every target.

    Why it matters: the best that such a loss can learn is the mean of the targets.

    How it is detected: a loss function, a difference or a product gets a column (N, 1) and a row (N,), of which one has
    a graph, and returns (N, N).

    Exceptions: pairs on purpose, as in ranking and contrastive losses. They are made with an explicit new dimension, or
    have a graph on both sides.

    Usual cause: the model returns (N, 1) and the targets are (N,), or the other way round.

    Fix: make the shapes the same: `prediction.squeeze(1)`, or `target.unsqueeze(1)`.

    Sources: the warning of torch.nn.functional.mse_loss; pytorch/pytorch#16045.
    """
    for step, facts in exams:
        for outer in facts.outer[:1]:
            shapes = " and ".join(str(shape) for shape in outer.shapes)
            yield run.finding(
                step,
                symptom=f"{outer.op} of shapes {shapes} gives {outer.terms} terms for {outer.samples} samples",
                cause="prediction and target differ by a dimension and broadcast: each prediction is compared with "
                "every target",
                where=Where(op=outer.op, source=outer.line),
                evidence=[
                    ("terms of the loss", outer.terms, outer.samples),
                    ("shapes", [list(each) for each in outer.shapes]),
                ],
            )
