from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.data import LoadersFacts


@check(points_at="loader", stage="input", confidence=0.85)
def persistent_workers_stale(run: RunContext, facts: LoadersFacts) -> Results:
    """An attribute of the data set changed after its persistent workers had started, and they use the old value.

    Why it matters: each worker holds a copy of the data set from when it started, so switching off an augmentation or
    setting the epoch has no effect.

    How it is detected: public attributes of the data set and its transforms (numbers, strings and booleans) are read
    when the workers of a loader with `persistent_workers=True` start, and compared at each later epoch.

    Usual cause: `dataset.attribute = value` between epochs, with `persistent_workers=True`.

    Fix: `persistent_workers=False`, or a new loader after the change, or a `multiprocessing.Value` as the attribute.

    Sources: jizhishutong/YOLOU#29, LibreYOLO PR 775, CondadosAI/modern-yolonas PR 58.
    """
    if (stale := facts.stale) is not None:
        yield run.finding(
            max(1, stale.step),
            symptom=f"{stale.name} changed from {stale.before} to {stale.now} before step {stale.step}; the persistent "
            f"workers still have {stale.before}",
            since_step=stale.step,
            where=Where(source=facts.source),
            evidence=[(stale.name, stale.before, stale.now)],
        )
