from trainwright.doctor import Every, Results, RunContext, check
from trainwright.doctor.facts.loss import LossFacts, calls, where_of

MAX_OUTSIDE = 0.02  # Fraction of targets that are out of reach
MIN_ROOM = 0.75
"""Fraction by which the best bounded scores must reduce the loss of equal scores.

With tanh over ten classes it is two thirds, because no class can get a probability above 0.45.
"""


@check(stage="loss", confidence=0.85, explains=("model.output_same_for_all_samples",), since_step=1)
def bounded_output(run: RunContext, exams: Every[LossFacts]) -> Results:
    """The output ends in a function with bounded values, which cannot reach the targets.

    How it is detected: the input of the loss function comes from a sigmoid, softmax, tanh, relu or softplus. For
    distances such as `mse_loss`: more than 2 % of the targets are beyond the bounds of this function. For losses of
    logits: the best scores within the bounds have a loss that is less than 75 % below that of equal scores.

    Usual cause: a final activation that does not fit the targets: relu or sigmoid before targets of both signs, tanh
    before cross entropy, relu before `binary_cross_entropy_with_logits`.

    Looks like: loss.softmax_before_cross_entropy, where the logits are probabilities.

    Fix: remove the last activation, or scale the targets to its range.

    Sources: UMLAUT (CHI 2021); DeepLocalize (ICSE 2021), faults of the last layer.
    """
    for step, _, call in calls(exams):
        if not call.bound or (call.outside <= MAX_OUTSIDE and call.room > MIN_ROOM):
            continue
        reach = f"{call.outside:.0%} of the targets are beyond what {call.bound} can give"
        gain = f"its best scores lower the loss of equal scores by only {call.room:.0%}"
        yield run.finding(
            step,
            symptom=f"the input of {call.op} ends in {call.bound}: {reach if call.outside > MAX_OUTSIDE else gain}",
            where=where_of(call),
            evidence=[
                ("fraction of targets out of reach", round(call.outside, 4), 0.0),
                ("possible reduction of the loss of equal scores", round(call.room, 3), f"> {MIN_ROOM}"),
            ],
        )
