from trainwright.doctor import Every, Results, RunContext, check
from trainwright.doctor.facts.loss import LossFacts, over_most_steps, where_of

MIN_STEPS = 6  # Examined steps in which the entropy is minimized


@check(stage="loss", confidence=0.85, since_step=1)
def entropy_minimized(run: RunContext, exams: Every[LossFacts]) -> Results:
    """The entropy bonus of a policy has the wrong sign: entropy is minimized, and exploration ends too early.

    How it is detected: in every examined step (at least 6) of a loop that draws actions from the outputs, the total
    loss decreases as the entropy decreases.

    Exceptions: losses without drawn samples, in which the entropy of predictions is minimized on purpose.

    Usual cause: `loss = policy_loss + coefficient * entropy`.

    Fix: `loss = policy_loss - coefficient * entropy`.

    Sources: nebuly-ai/optimate PR 250, rlworkgroup/garage#628.
    """
    facts = over_most_steps(exams)
    for call in facts.given if facts.drawn else ():
        if call.op == "entropy" and call.wants == -1 and call.steps >= MIN_STEPS:
            yield run.finding(
                cause="the entropy bonus has the wrong sign: the entropy of the policy is minimized, not maximized",
                where=where_of(call),
                evidence=[("examined steps in which entropy is minimized", call.steps, 0)],
            )
