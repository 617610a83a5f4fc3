from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.loss import CONSEQUENCES_OF_WRONG_ARGUMENTS, LossFacts, calls, where_of


@check(stage="loss", confidence=0.9, needs=LossFacts, explains=CONSEQUENCES_OF_WRONG_ARGUMENTS)
def arguments_swapped(run: RunContext) -> Results:
    """Prediction and target of a loss function are swapped.

    How it is detected: the second argument of cross entropy, of a binary loss or of `kl_div` has a graph, and the first
    has none.

    Usual cause: `loss_function(target, prediction)`; PyTorch's loss functions take the prediction first, other
    libraries the target.

    Fix: `loss_function(prediction, target)`.
    """
    for step, _, call in calls(run):
        if call.swapped:
            yield run.finding(
                step,
                symptom=f"the second argument of {call.op} has a graph and the first has none",
                since_step=1,
                where=where_of(call),
                evidence=[("target has a graph", True, False)],
            )
            return
