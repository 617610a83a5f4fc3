from trainwright.doctor import NotApplicable, Passed, Results, RunContext, Where, check
from trainwright.doctor.facts.data import LoadersFacts, TargetsFacts

MIN_BATCHES = 16
"""Minimum number of batches whose labels are equal."""
MIN_TARGETS = 128


@check(stage="label", severity="critical", confidence=0.9, needs=(LoadersFacts, TargetsFacts))
def labels_all_equal(run: RunContext) -> Results:
    """All labels that the loader has given are the same.

    Why it matters: the loss falls to 0 at once, because the model learns to give one answer whatever the input is.

    How it is detected: all targets of a loss over classes are one class, and the column of the batch that they come
    from has one value in all of 16 batches, and in samples from all over the data set.

    Exceptions: targets that the loop makes itself, as of a contrastive loss.

    Usual cause: the label is read from a wrong column or directory name, a comparison is never true, or a conversion to
    integers makes 0 of everything.

    Looks like: data.unshuffled, where each batch has one class and the next ones another.

    Fix: count the labels of the data set before the training.

        print(Counter(int(y) for _, y in dataset))
    """
    facts, targets = run.measured(LoadersFacts), run.measured(TargetsFacts)
    if len(facts.entropies) < MIN_BATCHES or targets.targets < MIN_TARGETS:
        yield NotApplicable("too few labels of batches are known")
    elif targets.smallest < targets.largest or any(facts.entropies) or not facts.mixed or facts.mixed[1] > 0.0:
        yield Passed(f"the labels of {len(facts.entropies)} batches")
    else:
        yield run.finding(
            run.last_step,
            symptom=f"all {targets.targets} targets are class {targets.largest}",
            since_step=1,
            where=Where(source=facts.source),
            evidence=[("different labels", 1, "2 or more")],
        )
