from trainwright.doctor import Every, Results, RunContext, check
from trainwright.doctor.facts.data import BatchFacts, LeakingColumn

MAX_ROUNDING_VARIANCE = 1e-12  # Fraction of a column's variance within classes that may be rounding
MIN_SAMPLES_IF_EXACT = 48  # If a column is exact on this many samples, one examination is enough


@check(stage="input")
def target_leak(run: RunContext, every: Every[BatchFacts]) -> Results:
    """One column of the input alone determines the target.

    Why it matters: training and validation are perfect, and the model is useless where that column is not known yet.

    How it is detected: in two examinations, the column is constant within each class and differs between classes, or is
    a linear function of a numeric target, and the prediction depends on the column. One examination is enough if this
    is exact on 48 samples, or if the target has several numbers and one of them equals the column.

    Exceptions: strong features, which still vary within a class; targets of more than a quarter of the values of the
    input, as in an autoencoder.

    Usual cause: the target, or a value computed from it, was left among the features.

    Looks like: model.future_leak and loss.no_shift, the same fault for sequences.

    Fix: drop that column; compute target encodings within the training fold only.

    Sources: DLCheck; arXiv 2412.11304; sktime/pytorch-forecasting#883.
    """
    exams = [facts for _, facts in every if facts.leaks]
    if len(exams) < 2 and not (exams and _is_exact(exams[0].leaks[0])):
        return
    last = {leak.column: leak for leak in exams[-1].leaks}
    leak = next((last[each.column] for each in exams[0].leaks if each.column in last), None)
    if leak is None:
        return
    is_exact = leak.within < MAX_ROUNDING_VARIANCE
    yield run.finding(
        severity="warning" if is_exact else "info",
        symptom=f"column {leak.column} of the input (from 0) determines the target of all {leak.samples} samples",
        sure=0.9 if is_exact else 0.7,
        evidence=[("variance of the column left within classes", leak.within, "> 0"), ("column", leak.column)],
    )


def _is_exact(leak: LeakingColumn) -> bool:
    return leak.is_copy or (leak.within < MAX_ROUNDING_VARIANCE and leak.samples >= MIN_SAMPLES_IF_EXACT)
