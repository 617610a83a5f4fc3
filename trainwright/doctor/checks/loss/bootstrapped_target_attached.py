from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.loss import LossFacts, sign_of


@check(stage="loss", confidence=0.85, since_step=1)
def bootstrapped_target_attached(run: RunContext, exams: Every[LossFacts]) -> Results:
    """The bootstrapped target of Q-learning is not detached, so the loss also moves the target towards the prediction.

    Why it matters: half of the update changes the value of the next state, so Q-learning is slow or finds wrong values.

    How it is detected: the loss compares the value of a chosen action with a constant plus a multiple of the largest
    (or of a chosen) value of a model. The autograd graphs of both lead to the same weights.

    Exceptions: residual-gradient methods, where this is intended; a target network with separate weights.

    Usual cause: the target is computed by the trained network, without `torch.no_grad()` or `.detach()`.

    Fix: compute the target under `torch.no_grad()`, or `target = (reward + gamma * next_value).detach()`.

    Sources: philtabor/Deep-Q-Learning-Paper-To-Code#9, datawhalechina/easy-rl PR 117.
    """
    sign = sign_of(exams, "target_attached")
    if sign is not None:
        yield run.finding(
            where=Where(op=sign.op, source=sign.line),
            evidence=[("steps in which the target has a graph", sign.steps, 0)],
        )
