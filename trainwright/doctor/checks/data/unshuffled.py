from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.data import LoadersFacts

MIN_BATCHES = 16


@check(stage="input", severity="critical")
def unshuffled(run: RunContext, facts: LoadersFacts) -> Results:
    """The data is sorted by class and read in that order, so each batch holds hardly more than one class.

    Why it matters: the model forgets the classes that it does not see, and the end of an epoch decides what it
    predicts.

    How it is detected: the mean label entropy of the first batches (up to 16) is below half of that of random batches,
    which are drawn from all labels so far or from samples all over the data set.

    Exceptions: a sampler that groups classes, as when tasks are learned one after the other (info).

    Usual cause: `shuffle=False`, which is the default of DataLoader.

    Fix: `DataLoader(dataset, shuffle=True)`; for a stream, a shuffle buffer and shards in random order.

    Sources: UMLAUT (Schoop et al., CHI 2021).
    """
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
