from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.data import LoadersFacts

MIN_RESTARTS = 8  # Number of iterators. Fewer may be a test, or short epochs.


@check(stage="input", confidence=0.95)
def workers_restarted_each_step(run: RunContext, facts: LoadersFacts) -> Results:
    """A new iterator of the loader is created in every step, which restarts its worker processes each time.

    Why it matters: starting processes takes longer than most steps, and the batches that they prefetch are discarded.
    With shuffling, each step draws from the whole data set again, so some samples come often and others never.

    How it is detected: at least 8 iterators of a loader with workers return fewer than two batches on average, although
    an epoch has more.

    Usual cause: `next(iter(loader))` in the loop.

    Fix: create the iterator once, and a new one only when it is used up.

        batches = iter(loader)
        ...
        x, y = next(batches)

    Sources: pytorch/pytorch#1917.
    """
    for each in facts.restarts:
        if each.iterators >= MIN_RESTARTS and each.batches < 2 * each.iterators and (each.length or MIN_RESTARTS) > 2:
            yield run.finding(
                symptom=f"{each.iterators} iterators of a loader gave {each.batches} batches: its {each.workers} "
                "workers start again each time",
                where=Where(source=facts.source),
                evidence=[("batches of an iterator", round(each.batches / each.iterators, 2), each.length)],
            )
