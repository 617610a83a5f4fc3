from trainwright.doctor import Every, RemedyTrial, Results, RunContext, Where, check, in_words
from trainwright.doctor.facts.loss import CONSEQUENCES_OF_WRONG_ARGUMENTS, LossFacts, calls, where_of

_SCORE_FUNCTIONS = ("cross_entropy", "log_softmax")


@check(
    points_at="construction",
    stage="loss",
    severity="critical",
    confidence=0.97,
    explains=(
        "loss.softmax_applied_twice",
        "loss.bounded_output",
        "gradient.vanishing",
        *CONSEQUENCES_OF_WRONG_ARGUMENTS,
    ),
)
def softmax_before_cross_entropy(run: RunContext, exams: Every[LossFacts]) -> Results:
    """`cross_entropy` gets probabilities, although it takes logits and applies a softmax itself.

    Why it matters: probabilities differ by at most 1, so the second softmax is nearly uniform. The loss cannot fall
    far, and gradients are small.

    How it is detected: every row of the input is non-negative and sums to 1, up to rounding. The same for a
    `log_softmax` whose result is used as a likelihood. For `binary_cross_entropy_with_logits`: the autograd graph of
    its input ends in a sigmoid or a softmax.

    Usual cause: the model ends in a softmax or a sigmoid, and the loss function applies another one.

    Looks like: loss.nll_without_log_softmax, where `nll_loss` gets probabilities.

    Fix: remove the softmax from the model in training, and pass its input (the logits) to the loss function.

    Sources: pytorch.org/docs, torch.nn.CrossEntropyLoss ("the input is expected to contain the unnormalized logits");
    UMLAUT (CHI 2021), rule "missing or double softmax".
    """
    for step, _, call in sorted(calls(exams), key=lambda each: each[2].made_in is None):
        is_twice = call.op in _SCORE_FUNCTIONS and call.simplex and (call.op == "cross_entropy" or call.wants == 1)
        if not is_twice and not call.squashed:
            continue
        first = "sigmoid" if call.squashed else "softmax"
        seen = "probabilities between 0 and 1" if call.squashed else "rows that sum to 1, none negative"
        is_unknown = call.made_in is None and call.made_at is None
        place = f" in {in_words(call.made_in)}" if call.made_in is not None else ""
        yield run.finding(
            step,
            symptom=f"the input of {call.op} consists of probabilities: {seen}",
            cause=f"the {first}{place} comes before {call.op}, which takes logits and applies its own",
            where=Where(op=first, shown_at=call.line) if is_unknown else where_of(call, call.made_in),
            evidence=[("input", seen, "logits"), ("shape", list(call.shape))],
            trial=RemedyTrial("logits_instead_of_probabilities"),
        )
