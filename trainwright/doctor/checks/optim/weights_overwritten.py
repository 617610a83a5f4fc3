import math
import statistics
from itertools import pairwise

from trainwright.doctor import NotApplicable, Passed, Results, RunContext, check
from trainwright.doctor.facts.updates import WritesFacts

MIN_EVALUATIONS = 2
LOSS_RISE_RATIO = 3
"""Rise of the loss / its usual change between steps. A smaller rise may be chance."""


@check(stage="loop", confidence=0.85, needs=WritesFacts)
def weights_overwritten(run: RunContext) -> Results:
    """After an evaluation the training goes on with other weights than before it.

    How it is detected: a sample of the weights is compared after an update and before the next one. It differs after
    two evaluations, the optimizer's state does not, and the loss rises there by more than three usual moves.

    Exceptions: reported only with -v where the loss does not rise.

    Usual cause: weights of an average or of a checkpoint are put into the model for an evaluation and not put back.

    Fix: keep a copy and load it back after the evaluation, or evaluate the average itself.
    """
    facts = run.measured(WritesFacts)
    if len(facts.steps) < MIN_EVALUATIONS:
        yield Passed(f"{facts.compared} evaluations") if facts.compared else NotApplicable("there is no evaluation")
        return
    losses = {each.step: each.loss for each in run.steps if math.isfinite(each.loss)}
    moves = [abs(b - a) for a, b in pairwise(losses.values())]
    rises = [losses[step] - losses[step - 1] for step in facts.steps if step in losses and step - 1 in losses]
    harms = bool(rises) and statistics.median(rises) > LOSS_RISE_RATIO * statistics.median(moves)
    yield run.finding(
        facts.steps[-1],
        symptom=f"step {facts.steps[-1]} began with other weights than the update before it had left, after "
        "an evaluation",
        severity="warning" if harms else "info",
        since_step=facts.steps[0],
        evidence=[("evaluations after which the weights differ", len(facts.steps), 0)]
        + ([("median rise of the loss there", statistics.median(rises), 0.0)] if rises else []),
    )
