from trainwright.doctor import Every, Results, RunContext, check
from trainwright.doctor.facts.loss import CONSEQUENCES_OF_WRONG_ARGUMENTS, LossFacts, calls, where_of


@check(
    stage="loss",
    severity="critical",
    confidence=0.98,
    explains=("gradient.*", "model.*", "optim.*", *CONSEQUENCES_OF_WRONG_ARGUMENTS),
    since_step=1,
)
def cross_entropy_over_one_class(run: RunContext, exams: Every[LossFacts]) -> Results:
    """Cross entropy gets a single logit, so the loss and all gradients are always 0.

    How it is detected: the class dimension of the input of `cross_entropy` has size 1. The softmax of one value is
    always 1.

    Usual cause: a binary classifier with one output is trained with the loss function for several classes.

    Looks like: optim.lr_too_low and gradient.vanishing, where the loss is not 0.

    Fix: `binary_cross_entropy_with_logits` for one logit, or two outputs with `cross_entropy`.

    Sources: darioizzo/dcgp#86; datascience.stackexchange.com/questions/37128.
    """
    for step, _, call in calls(exams):
        if call.op == "cross_entropy" and call.classes == 1:
            yield run.finding(
                step,
                symptom=f"cross_entropy gets one logit for each sample (shape {call.shape}): the loss is always 0",
                cause="cross entropy over a single logit: the softmax of one value is 1, so the loss is always 0",
                where=where_of(call),
                evidence=[("size of the class dimension", 1, ">= 2"), ("shape", list(call.shape))],
            )
