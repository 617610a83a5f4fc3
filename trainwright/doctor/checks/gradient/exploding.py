from trainwright.doctor import Every, RemedyTrial, Results, RunContext, check
from trainwright.doctor.facts.calls import kinds
from trainwright.doctor.facts.weights import UpdateFacts

MAX_STEP = 4  # The last step in which the weights are still nearly the initial ones
MIN_RELATIVE_GRADIENT = 300.0
"""Relative change of the loss / relative change of the weights: weights that change by 1% change the loss by 300%."""


@check(stage="backward", confidence=0.8, explains=("optim.lr_too_high",))
def exploding(run: RunContext, exams: Every[UpdateFacts]) -> Results:
    """Gradients explode in the first steps, before anything is trained.

    How it is detected: in the first four steps, the norm of the gradient times the norm of the weights, summed over the
    tensors, is more than 300 times the loss. A loss below 1 counts as 1, because some losses, such as that of a policy,
    are near 0.

    Exceptions: reported only with -v where gradients are clipped.

    Usual cause: gradients grow by a factor with each layer or time step: an RNN whose recurrent weights have a norm
    above 1, or a deep network without normalization.

    Looks like: optim.lr_too_high, where the first gradients are normal; inputs or targets that are not normalized.

    Fix: `clip_grad_norm_(model.parameters(), 1.0)`; `nn.init.orthogonal_(rnn.weight_hh_l0)`, or an LSTM instead of a
    plain RNN; `hidden = hidden.detach()` every k time steps.

    Sources: Pascanu, Mikolov and Bengio 2013.
    """
    early = [(step, facts) for step, facts in exams if step <= MAX_STEP]
    ratios = [(facts.gradient_times_weight / max(abs(facts.loss), 1.0), step, facts) for step, facts in early]
    if not ratios:
        return
    ratio, step, facts = ratios[-1]
    if not all(each > MIN_RELATIVE_GRADIENT for each, _, _ in ratios):
        return
    yield run.finding(
        step,
        symptom=f"the gradient norm is {facts.grad_norm:.3g} at a loss of {facts.loss:.3g} and weights of norm "
        f"{facts.weight_norm:.3g}",
        severity="info" if any(kinds(each, "clip") for each in run.steps) else "warning",
        evidence=[
            ("relative change of the loss / relative change of the weights", ratio, f"below {MIN_RELATIVE_GRADIENT:g}")
        ],
        trial=RemedyTrial("clip_at", {"at": 1.0}),
    )
