import math
from itertools import takewhile

from trainwright.doctor import NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.weights import WeightsFacts

MIN_STEPS = 16  # Consecutive recorded steps with the same loss; three times as many if it is rounded to 16 bits
MAX_RELATIVE_ROUNDING = 2e-6  # Relative rounding error of equal sums in float32
LN_2 = math.log(2)


@check(
    names_cause=False,
    points_at="backward",
    stage="loss",
    confidence=0.9,
    explains=("loss.no_better_than_constant", "model.output_same_for_all_samples", "optim.weights_never_move"),
)
def never_changes(run: RunContext) -> Results:
    """The loss has the same value in every step, whatever the batch is.

    How it is detected: the losses of at least the last 16 recorded steps are equal up to rounding of float32.

    Exceptions: a loss of 0 that had another value before, or that has a gradient above 0, as in policy gradients.

    Usual cause: the loss does not depend on what is learned: its terms cancel, its input is constant, or it is a
    constant number. For a preference loss (DPO) that stays at ln 2 = 0.6931, the reference model is the policy itself,
    so the margin is always 0.

    Looks like: optim.weights_never_move, where the loss changes from batch to batch.

    Fix: print the tensors that enter the loss for two different batches. For DPO: `reference = copy.deepcopy(policy)`
    before training, in eval mode and without gradients.

    Sources: huggingface/trl#1311, #1627; eric-mitchell/direct-preference-optimization#46.
    """
    steps = [each for each in run.steps if math.isfinite(each.loss)]
    if not steps:
        return
    loss, weights = steps[-1].loss, run.latest(WeightsFacts)
    same = list(takewhile(lambda each: abs(each.loss - loss) <= MAX_RELATIVE_ROUNDING * abs(loss), reversed(steps)))
    is_coarse = loss != 0.0 and math.frexp(loss)[0] * 2**11 % 1 == 0.0
    is_late = len(same) < len(steps)
    stands = is_late and weights is not None and not weights.moved
    if stands or len(same) < (3 if is_coarse and is_late else 1) * MIN_STEPS:
        return
    has_gradient = any(math.isfinite(each.grad_norm) and each.grad_norm > 0 for each in same)
    if loss == 0.0 and (is_late or has_gradient):
        yield NotApplicable("the loss is 0, and was not before or has a gradient")
        return
    is_preference = abs(loss - LN_2) < 1e-5
    yield run.finding(
        same[-MIN_STEPS].step,
        symptom=f"the loss is {loss:.6g} in {len(same)} recorded steps in a row",
        cause="the loss stays at ln 2 = 0.6931: the margin is always 0. The reference model of DPO is the policy "
        "itself, or both scores of a pair are the same"
        if is_preference
        else "",
        severity="info" if is_late and has_gradient else "warning",
        since_step=same[-1].step,
        evidence=[("recorded steps in a row with the same loss", len(same), 1)],
    )
