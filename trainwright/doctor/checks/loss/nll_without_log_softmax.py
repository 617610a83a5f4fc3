from trainwright.doctor import Every, RemedyTrial, Results, RunContext, check
from trainwright.doctor.facts.loss import CONSEQUENCES_OF_WRONG_ARGUMENTS, LossFacts, MeasuredLoss, calls, where_of

MIN_ABOVE_0 = 0.1
"""Fraction of the input above 0. The logarithm of a density may be above 0, but not that of a class probability."""
MAX_OFF_SUM = 0.05  # bfloat16 (8 bits) leaves the sum of several hundred probabilities within this distance of 1


@check(
    points_at="construction",
    stage="loss",
    severity="critical",
    confidence=0.95,
    explains=("gradient.*", *CONSEQUENCES_OF_WRONG_ARGUMENTS),
)
def nll_without_log_softmax(run: RunContext, exams: Every[LossFacts]) -> Results:
    """`nll_loss`, `ctc_loss` or `kl_div` gets probabilities or logits, although it takes log-probabilities.

    Why it matters: `nll_loss` only negates the value of the target class. With probabilities it has hardly any gradient
    where the model is wrong; with logits it falls below 0, without bound.

    How it is detected: at least 10 % of the input of `nll_loss` or `ctc_loss` is above 0; or all rows are
    probabilities; or some of it is above 0, and the sum of exp(input) over a row is not 1 (median over the rows, within
    0.05). For `kl_div`: all rows are probabilities.

    Exceptions: weighted log-probabilities, as in a focal loss: their rows do not sum to 1, but no value is above 0.

    Usual cause: `log_softmax` is missing before the loss, or it is taken over another dimension than the classes.

    Looks like: loss.softmax_before_cross_entropy, where `cross_entropy` gets probabilities.

    Fix: `cross_entropy(logits, target)`, or `log_softmax(logits, dim=1)` directly before `nll_loss`.

    Sources: pytorch/pytorch#41108; SeanNaren/deepspeech.pytorch#488.
    """
    for step, _, call in calls(exams):
        found = _mistake(call)
        if found is None:
            continue
        what, severity = found
        is_kl = call.op == "kl_div"  # Its input is only examined for probabilities
        yield run.finding(
            step,
            symptom=f"the input of {call.op} is {what}, not log-probabilities"
            if is_kl
            else f"the input of {call.op} is {what}: {call.above_0:.0%} of it is above 0, and the sum of exp(input) "
            f"over a row differs from 1 by {call.off_sum:.2g}",
            cause="log_softmax is missing before kl_div, which takes log-probabilities" if is_kl else "",
            remedy="`kl_div(log_softmax(logits, dim=1), target)`" if is_kl else "",
            severity="critical" if severity == "critical" else "warning",
            where=where_of(call, call.made_in),
            evidence=[("rows of the input that are not negative and sum to 1", "all", "none")]
            if is_kl
            else [
                ("fraction of the input above 0", round(call.above_0, 3), 0.0),
                ("distance of the sum of exp(input) of a row from 1", round(call.off_sum, 3), 0.0),
            ],
            trial=RemedyTrial("logits_instead_of_probabilities"),
        )


def _mistake(call: MeasuredLoss) -> tuple[str, str] | None:
    """Returns what the input is instead of log-probabilities, and the severity; None if it is correct."""
    if call.op not in ("nll_loss", "ctc_loss", "kl_div"):
        return None
    if call.simplex:
        return "probabilities", "critical"
    if call.above_0 >= MIN_ABOVE_0:
        return "logits", "critical"
    return ("no log-probabilities", "warning") if call.off_sum > MAX_OFF_SUM and call.above_0 > 0 else None
