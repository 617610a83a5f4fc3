from trainwright.doctor import Every, Finding, Results, RunContext, Where, check
from trainwright.doctor.facts.data import TargetsFacts, TokensFacts


@check(stage="label")
def eos_ignored(run: RunContext, exams: Every[TokensFacts]) -> Results:
    """The token that ends a text is never a target.

    Why it matters: the model never learns to stop, so it generates text up to the length limit, whatever the loss is.

    How it is detected: the padding id also occurs between targets, the attention mask counts its first occurrence as
    text, or the model's configuration or a tokenizer names it as `eos_token_id`. It is never a target.

    Exceptions: padding that occurs only at the end; prompts that are not trained on; a token that most rows begin with,
    such as the header of a turn, unless it is named as `eos_token_id`.

    Usual cause: the end-of-text token is the padding token as well, and the loss ignores padding.

    Looks like: data.pad_in_loss, where padding counts as a target.

    Fix: use a separate padding token, or mask labels by position: `ids.masked_fill(attention_mask == 0, -100)`.

    Sources: huggingface/trl#1623, huggingface/trl PR 6357.
    """
    found: Finding | None = None
    targets = run.latest(TargetsFacts)
    named = targets.ends if targets is not None else ()
    for step, facts in exams:
        for loss in facts.losses:
            ends = loss.ends
            if ends is None:
                continue
            if ends.targets:
                return
            seen = max(ends.within, ends.attended)
            is_end = ends.is_end or ends.id in named
            ends_texts = is_end or (seen >= max(2, ends.rows // 8) and not ends.begins)
            if found is None and loss.offset == 1 and ends_texts:
                how = (
                    "only as padding"
                    if not seen
                    else "between targets"
                    if ends.within >= ends.attended
                    else "where the attention mask counts it"
                )
                found = run.finding(
                    step,
                    symptom=f"token {ends.id} ends texts and is never a target: it occurs "
                    + (f"{seen} times {how}" if seen else how),
                    where=Where(op="cross_entropy"),
                    evidence=[("ends among the targets", 0, "> 0")],
                )
    if found is not None:
        yield found
