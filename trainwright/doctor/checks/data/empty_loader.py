from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.data import LoadersFacts


@check(stage="input", confidence=1.0, explains=("optim.step_never_called",))
def empty_loader(run: RunContext, facts: LoadersFacts) -> Results:
    """The loader gives no batch, so an epoch has no steps.

    How it is detected: an iterator was created and returned no batch, and the length of the loader is 0. A loader
    without a length must be found empty twice.

    Usual cause: the data set is smaller than a batch and `drop_last=True`, a filter left nothing, or a generator is
    already exhausted.

    Looks like: optim.step_never_called, where batches come and no step follows.

    Fix: `drop_last=False` or a smaller `batch_size`; `assert len(loader) > 0` before the loop.
    """
    for each in facts.empty:
        if each.length not in (0, None) or (each.length is None and each.epochs < 2):
            continue
        times = "once" if each.epochs == 1 else f"{each.epochs} times"
        cause = f"it has {each.samples} samples, a batch has {each.batch_size}"
        cause += ", and drop_last=True drops the incomplete one" if each.drop_last else ""
        yield run.finding(
            severity="warning" if run.steps else "critical",
            symptom=f"a loader was iterated over {times} and gave no batch",
            cause="its data set gives no samples" if each.samples is None else cause,
            evidence=[("batches in an epoch", 0, "> 0"), ("samples", each.samples), ("drop_last", each.drop_last)],
        )
