from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.layers import LayersFacts

MIN_EXAMS = 3


@check(stage="forward", confidence=0.85, since_step=1, explains=("optim.weights_never_move",))
def softmax_over_one_value(run: RunContext, exams: Every[LayersFacts]) -> Results:
    """A softmax runs over an axis with one value, so its result is always 1 and its input has no gradient.

    Why it matters: attention weights, gates or mixtures that are always 1 select nothing. The layers that compute them
    are never trained.

    How it is detected: in all passes of at least three examined steps, the axis of a softmax inside the model has
    size 1, and another axis is larger.

    Exceptions: sequences of length 1.

    Usual cause: scores of shape (batch * time, 1) or (batch, time, 1), and `dim=-1` or `dim=1` where the softmax should
    run over the time.

    Looks like: loss.cross_entropy_over_one_class, where the axis with one value is in the output of the model.

    Fix: `scores.squeeze(-1).softmax(dim=1)`, over the axis whose weights should sum to 1.

    Sources: PetrochukM/PyTorch-NLP#2, DEEP-PolyU/KEQA_WSDM19#2, phanideepgampa/stacked-capsule-networks PR 5.
    """
    step, newest = exams[-1]
    found = newest.wrong_axes("one_value")
    if len(exams) >= MIN_EXAMS and found:
        yield run.finding(step, where=Where(module=found[0].module, op="softmax", source=found[0].line))
