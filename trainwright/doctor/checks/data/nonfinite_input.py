from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.precision import SeenNonfinite, TraceFacts
from trainwright.doctor.nonfinite import (
    CONSEQUENCES,
    MAX_IDS,
    Mechanism,
    finding_of,
    skipped_by_scaler,
    traced_at,
    traces,
)


@check(stage="input", severity="critical", confidence=0.97, explains=CONSEQUENCES)
def nonfinite_input(run: RunContext) -> Results:
    """A batch holds NaN or infinity before the first operation of the model has run.

    How it is detected: after a step that is not finite, the inputs of its forward calls and of its loss are searched
    for NaN and infinity; the step is replayed without the samples that contain them.

    Usual cause: missing values in the source, a division by the deviation of a constant feature, a broken file.

    Looks like: precision.division_by_zero and others, where the input is finite and an operation makes the first bad
    value.

    Fix: drop or impute such samples where the data is read: `bad = (~x.isfinite()).flatten(1).any(1).nonzero()`.

    Sources: Marigold #111, ecole #324.
    """
    for found in traces(run):
        if found[2].kind in ("input", "target"):
            what = "the input of the model" if found[2].kind == "input" else "a tensor that enters the loss"
            yield finding_of(run, found, Mechanism(what + " is {what}"))
            return
    for step, seen in run.every(SeenNonfinite):
        trace = traced_at(run, step)
        if not seen.inputs or skipped_by_scaler(run, step) or (isinstance(trace, TraceFacts) and trace.first):
            continue
        yield run.finding(
            step,
            symptom=f"NaN or infinite values in step {step}",
            cause="the input of the model is not finite",
            where=Where(
                dtype=seen.inputs[0].dtype, sample_ids=tuple(i for each in seen.inputs for i in each.ids)[:MAX_IDS]
            ),
            evidence=[("non-finite values in the input", sum(each.nan + each.inf for each in seen.inputs), 0)],
        )
