from trainwright.doctor import Every, Results, RunContext, check, in_words
from trainwright.doctor.facts.loss import LossFacts, calls, where_of


@check(points_at="construction", stage="loss", confidence=0.9)
def softmax_applied_twice(run: RunContext, exams: Every[LossFacts]) -> Results:
    """A softmax is applied to the output of a softmax, so its result is nearly uniform.

    Why it matters: probabilities differ by at most 1. A softmax of them is nearly uniform, and gradients are small.

    How it is detected: every row of the input of a `softmax` or `log_softmax` is non-negative and sums to 1.

    Usual cause: a module returns probabilities, as a router of experts does, and the caller expects logits.

    Looks like: loss.softmax_before_cross_entropy, where the second softmax is the one inside of the loss.

    Fix: pass the logits to the second softmax, or remove it.
    """
    for step, _, call in calls(exams):
        if not call.simplex or "softmax" not in call.op or (call.op == "log_softmax" and call.wants == 1):
            continue  # softmax_before_cross_entropy reports likelihoods
        first = f" in {in_words(call.made_in)}" if call.made_in is not None else ""
        yield run.finding(
            step,
            symptom=f"the input of a {call.op} in {in_words(call.module)} consists of probabilities",
            cause=f"a softmax{first} has already been applied to the logits: the second one flattens them",
            where=where_of(call, call.made_in),
            evidence=[("sum of each row of its input", 1.0, "scores"), ("shape", list(call.shape))],
        )
