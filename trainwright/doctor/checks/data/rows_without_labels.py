from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.loss import LossFacts, over_most_steps

MIN_FRACTION = 0.1  # Minimum fraction of the rows, in every examined step
MIN_STEPS = 4


@check(
    stage="label",
    confidence=0.85,
    explains=("loss.never_changes", "loss.no_better_than_constant", "optim.weights_never_move"),
    since_step=1,
)
def rows_without_labels(run: RunContext, exams: Every[LossFacts]) -> Results:
    """Some rows have no label: all of their tokens are ignored, so these rows never enter the loss.

    Why it matters: what these rows are meant to teach is never learned, and the loss looks normal.

    How it is detected: the targets of texts begin with ignored tokens (the prompt), and the answer follows. In at least
    a tenth of the rows of every examined step all targets are ignored, in four steps or more. Or all targets of an
    examined step are ignored, and the loss and the gradient of the first four steps are exactly 0 (critical).

    Exceptions: losses whose other rows have labels at their first tokens, or only at scattered tokens.

    Usual cause: the template that marks the answer is not found, because it is tokenized differently in its context; or
    the rows were truncated before the answer.

    Fix: compare the token ids of the template with `batch["input_ids"]`, and search for the ids as they occur there.
    Drop or count rows without labels.

    Sources: huggingface/trl#598, huggingface/trl#1183, lm-sys/FastChat#2992.
    """
    ignored = next((each for _, facts in exams for each in facts.given if each.ignored == 1.0), None)
    first = run.steps[:MIN_STEPS]
    if ignored is not None and len(first) == MIN_STEPS and not any(each.loss or each.grad_norm for each in first):
        yield run.finding(
            first[-1].step,
            symptom="all targets of every row are ignored, so the loss is 0 and nothing is trained",
            severity="critical",
            where=Where(op=ignored.op, source=ignored.line),
            evidence=[("fraction of the targets that are ignored", 1.0, "< 1")],
        )
        return
    for each in over_most_steps(exams).given:
        if each.rows_without >= MIN_FRACTION and each.steps >= MIN_STEPS:
            yield run.finding(
                symptom=f"in every examined step at least {each.rows_without:.0%} of the rows have no label: all of "
                "their targets are ignored",
                where=Where(op=each.op, source=each.line),
                evidence=[("smallest fraction of rows without a label", round(each.rows_without, 3), 0)],
            )
