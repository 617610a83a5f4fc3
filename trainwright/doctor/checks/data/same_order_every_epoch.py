from trainwright.doctor import Results, RunContext, Where, check
from trainwright.doctor.facts.data import LoadersFacts, RowsFacts

MIN_SAMPLES = 16  # A random order of this many samples repeats by chance once in 16! times
MIN_PERIOD = 4  # Minimum number of batches in a sequence that repeats
MIN_RECURRED_BATCHES = 8


@check(stage="input", confidence=0.95)
def same_order_every_epoch(run: RunContext) -> Results:
    """Each epoch has the same batches in the same order, although the loader shuffles.

    Why it matters: the same samples always share a batch, and random augmentation is not drawn again.

    How it is detected: two epochs have the same sample ids in the same order, and it is not the order of the data set.
    Or 8 batches in a row repeat earlier batches of a shuffling loader, while the loop does not read the loader.

    Exceptions: a custom sampler may have a fixed order on purpose (info). Batches that are skipped to resume an epoch.

    Usual cause: the generator is seeded again in each epoch, `set_epoch` is missing, or `itertools.cycle(loader)`
    keeps the batches of the first epoch and repeats them.

    Fix: seed once before the first epoch, call `sampler.set_epoch(epoch)` in each, and write a generator instead of
    itertools.cycle.

        def forever(loader):
            while True:
                yield from loader

    Sources: pytorch/pytorch#31771, pytorch/pytorch#23900, bytedance/UNO#64.
    """
    loaders, rows = run.latest(LoadersFacts), run.latest(RowsFacts)
    seen = [each for each in loaders.repeats if each.samples >= MIN_SAMPLES and not each.ascending] if loaders else []
    repeats = [each for each in seen if each.equal == each.batches > 0]
    if repeats:
        repeat = repeats[-1]
        cause = (
            "DistributedSampler.set_epoch is not called"
            if repeat.distributed
            else "the generator of the sampler starts from the same seed in each epoch"
        )
        yield run.finding(
            severity="warning" if repeat.random else "info",
            symptom=f"an epoch has the {repeat.equal} batches of the epoch before, in the same order",
            cause=cause if repeat.random else f"{repeat.sampler} gives a fixed order; fine if that is intended",
            sure=0.95 if repeat.random else 0.5,
            where=Where(source=loaders.source if loaders else None),
            evidence=[("equal batches in a row", repeat.equal, 0), ("sampler", repeat.sampler)],
        )
    elif rows is not None and rows.is_kept and rows.period >= MIN_PERIOD and rows.recurred >= MIN_RECURRED_BATCHES:
        yield run.finding(
            rows.steps,
            symptom=f"the same {rows.period} batches come again and again, in the same order",
            cause="the batches of the first epoch are kept and repeated, as by itertools.cycle(loader): they are not "
            "shuffled or augmented again",
            sure=0.85,
            where=Where(op="cycle", shown_at=rows.source),
            since_step=max(1, rows.steps - rows.recurred),
            evidence=[("batches in a row that came before", rows.recurred, 0), ("period in batches", rows.period)],
        )
