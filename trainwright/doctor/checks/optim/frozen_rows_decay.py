from trainwright.doctor import Results, RunContext, Where, check, in_words
from trainwright.doctor.facts.layers import ModulesFacts


@check(stage="update", confidence=0.85, since_step=1)
def frozen_rows_decay(run: RunContext, facts: ModulesFacts) -> Results:
    """Rows of an embedding whose gradient is set to zero still change.

    How it is detected: in a few steps, the gradients of the rows that the batch uses are compared after the backward
    pass and right before the update. In at least 8 rows, and a quarter of those used, the gradient was set to 0 in
    between, but the row changed. If the weight has a hook, the gradient may be 0 already after the backward pass.

    Exceptions: rows that the loss does not reach, such as those of padding.

    Usual cause: the gradients of frozen rows are set to 0, but weight decay or momentum still changes these rows.

    Fix: `weight_decay=0` for this embedding, or copy the frozen rows back after each step.

    Sources: huggingface/diffusers#1009, #1176.
    """
    for each in facts.tables:
        if each.decayed >= max(8, 0.25 * each.used):
            yield run.finding(
                symptom=f"{each.decayed} rows of {in_words(each.path)} change though their gradient is always 0",
                where=Where(module=each.path),
                evidence=[("rows without a gradient that changed", each.decayed, 0), ("rows used", each.used)],
            )
