from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.data import TokensFacts

MIN_SCORE_CHANGE = 1e-3  # Change of a score, in standard deviations of the scores, that exceeds rounding


@check(stage="label", severity="critical", confidence=0.95)
def no_shift(run: RunContext, exams: Every[TokensFacts]) -> Results:
    """The targets of a causal model are its input tokens, or tokens at another offset than the next one.

    Why it matters: copying is easy, so the loss falls to 0 fast, and generated text repeats the prompt.

    How it is detected: 95 % of the targets equal the input at one offset that is not the next token, and the scores do
    not change with later tokens.

    Exceptions: a model that sees the whole row (autoencoders, masked tokens), or whose scores do not depend on the
    token at their position (it shifts its input itself). Another loss of the step predicts the next token.

    Usual cause: targets are not shifted against the inputs; or they are shifted twice, by the loop and by the model, as
    `transformers` models shift `labels` themselves.

    Looks like: model.future_leak, where the targets are shifted and the model sees the later tokens.

    Fix: shift once: `cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())`.

    Sources: huggingface/transformers#27517.
    """
    for step, facts in exams:
        if any(each.offset == 1 for each in facts.losses):
            return
        for loss in facts.losses:
            offset, given = loss.offset, loss.given
            if offset is None or loss.sees is None or loss.sees > MIN_SCORE_CHANGE:
                continue
            if offset == 0 and given is not None and given <= MIN_SCORE_CHANGE:
                continue
            target = {0: "the input token itself", -1: "the token before"}.get(offset, f"the token {offset} places on")
            yield run.finding(
                step,
                severity="critical" if offset >= 0 else "info",  # copying the input is a task of its own
                symptom=f"{loss.fraction:.0%} of the targets are {target}, not the next one",
                cause="targets are not shifted by one against the inputs" if offset <= 0 else "they are shifted twice",
                where=Where(op="cross_entropy"),
                evidence=[
                    ("targets that equal the input there", loss.fraction, 0.0),
                    ("change of scores when only later tokens change", loss.sees, 0.0),
                ],
            )
