from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.data import SamplesFacts

MIN_CHANGES = 4
CONSEQUENCES = ("precision.overflow", "gradient.spike", "gradient.exploding", "optim.lr_too_high")


@check(stage="input", confidence=0.9, explains=CONSEQUENCES)
def changed_in_place(run: RunContext, facts: SamplesFacts) -> Results:
    """The stored training data are changed in place, so a sample has different values when it is read again.

    Why it matters: each epoch normalizes the samples again, until they are far from what the model has learned.

    How it is detected: the first samples of each batch, and inputs that are slices of a larger tensor, are compared
    when they are read again. At least four have changed, and for each element, one `a * x + b` explains all of these
    changes. Or the version counter of an input changes during a step, in at least four steps.

    Exceptions: an input that is not a view of a larger tensor is reported only with -v.

    Usual cause: `x -= mean`, `x.mul_()` or `out=x` on the result of indexing in `__getitem__`, a view of the stored
    array.

    Fix: work out of place (`x = x - mean`), or on `x.clone()` or `x.copy()`.

    Sources: facebookresearch/pycls#21, pytorch/vision#680.
    """
    if facts.changed:
        yield run.finding(
            symptom=f"stored samples are modified: {facts.changed} were read again with the values "
            f"{facts.factor:.3g} * x + constant instead of x",
            since_step=facts.since_changed,
            where=Where(source=facts.source),
            evidence=[("samples that had other values when they came again", facts.changed, 0)],
        )
    elif facts.written >= MIN_CHANGES:
        is_view = facts.written_views >= MIN_CHANGES
        yield run.finding(
            symptom=f"in {facts.written} steps the input of the model is written to in place",
            severity="warning" if is_view else "info",
            sure=0.6,
            since_step=facts.since_written,
            evidence=[("steps that wrote to their input", facts.written, 0)],
        )
