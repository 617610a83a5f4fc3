from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.loss import LossFacts, over_most_steps


@check(stage="loss", confidence=0.85, since_step=1)
def advantage_not_detached(run: RunContext, exams: Every[LossFacts]) -> Results:
    """The advantage is not detached, so the policy loss also trains the critic and biases its values.

    How it is detected: log-probabilities of chosen actions are multiplied by the difference of a constant and an output
    of the model, and both factors have a graph.

    Usual cause: `advantage = returns - value` without `.detach()`.

    Fix: `advantage = (returns - value).detach()` in the policy loss; the value loss keeps its graph.

    Sources: astariul/encode-attend-navigate-pytorch#2, keras-team/keras-io#194.
    """
    facts = over_most_steps(exams)
    for sign in facts.signs:
        if sign.kind == "advantage":
            yield run.finding(
                cause="the advantage (returns - value) is not detached: the policy loss sends its gradient into the "
                "critic",
                where=Where(op=sign.op, source=sign.line),
                evidence=[("factor of the log-probabilities has a graph", True, False)],
            )
