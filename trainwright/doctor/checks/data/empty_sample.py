from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.nonfinite import MAX_IDS, traces, where_of, without_samples


@check(stage="input", severity="critical", confidence=0.84)
def empty_sample(run: RunContext) -> Results:
    """A sample is empty: every element of its input is the same padding value, and its mean or attention is 0/0.

    How it is detected: each sample that alone makes the step non-finite has an input with a single value in all
    elements.

    Usual cause: an empty document, or one that was truncated to nothing.

    Looks like: data.nonfinite_input, where the input itself is not finite.

    Fix: remove such samples when the dataset is built (`keep = lengths > 0`), or clamp the count:
    `(h * mask).sum(1) / mask.sum(1).clamp(min=1)`.

    Sources: Automodel PR 2468.
    """
    for step, trace, first in traces(run):
        if first.kind == "op" and first.empty is not None:
            yield run.finding(
                step,
                symptom=f"a sample of step {step} is empty",
                cause=f"every element of its input is {first.empty:g}, so nothing in it is counted or attended to "
                f"in {first.op}",
                where=where_of(trace, first, list(first.ids[:MAX_IDS])),
                evidence=[("the value of every element", first.empty)],
                trial=without_samples(trace, first),
            )
