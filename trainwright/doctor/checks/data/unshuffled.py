from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.data import LoadersFacts, TargetsFacts

MIN_BATCHES = 16


@check(stage="input", severity="critical")
def unshuffled(run: RunContext) -> Results:
    """The data is sorted by class and read in that order, so each batch holds hardly more than one class.

    Why it matters: the model forgets the classes that it does not see, and the end of an epoch decides what it
    predicts.

    How it is detected: the mean label entropy of the first batches (up to 16) is below half of that of random batches,
    which are drawn from all labels so far or from samples all over the data set. Without a DataLoader: in 16 of the
    first 64 steps in a row, no label of the loss is below one of the step before, and two classes or more occur.

    Exceptions: a sampler that groups classes, as when tasks are learned one after the other (info).

    Usual cause: `shuffle=False`, which is the default of DataLoader.

    Fix: `DataLoader(dataset, shuffle=True)`; for a stream, a shuffle buffer and shards in random order.

    Sources: UMLAUT (Schoop et al., CHI 2021).
    """
    facts, targets = run.latest(LoadersFacts), run.latest(TargetsFacts)
    if facts is None or not facts.entropies:
        if targets is not None and targets.ascending >= MIN_BATCHES:
            yield run.finding(
                severity="warning",
                symptom=f"the labels of {targets.ascending} steps in a row are sorted by class",
                where=Where(op="cross_entropy"),
                evidence=[("steps in a row without a label below one of the step before", targets.ascending, "2 to 3")],
            )
        return
    if len(facts.entropies) < 2 or not facts.mixed:
        return
    entropies, (lowest, usual) = facts.entropies[:MIN_BATCHES], facts.mixed
    mean = sum(entropies) / len(entropies)
    if usual < 0.2 or mean > 0.5 * usual or mean >= lowest:
        return
    yield run.finding(
        severity="critical" if facts.ascending else "info",
        symptom=f"batches hold hardly more than one class each: label entropy {mean:.2f}, shuffled {usual:.2f}",
        cause="" if facts.ascending else "the sampler puts samples of one class together; fine if that is intended",
        sure=0.9 if facts.ascending else 0.7,
        where=Where(source=facts.source),
        evidence=[("label entropy of a batch", round(mean, 3), round(usual, 3)), ("batches", len(entropies))],
        explains=("optim.lr_too_high",),
    )
