from trainwright.doctor import Finding, NotApplicable, Results, RunContext, Where, check
from trainwright.doctor.facts.data import LoadersFacts, RowsFacts

MAX_SHARED_FRACTION = 0.01  # Fraction of samples that may be in both sets
MAX_NEW_FRACTION = 0.05  # Fraction of new rows in the last steps. With more, training has not read all of its data.
MIN_SHARED_ROWS = 4
"""Minimum number of equal rows. Fewer may be equal by chance, for instance generated curves with only a few phases."""
MIN_PARTS, MAX_MOVED_FRACTION = 64, 0.5
MIN_CONTAINED = 0.95  # Fraction of a set, or of the training set, that is shared if that set is evaluated on purpose
CHANCE_MULTIPLE = 4.0  # Multiple of the number of rows that are equal by chance


@check(points_at="split", stage="input", confidence=0.9)
def train_val_overlap(run: RunContext) -> Results:
    """Samples of the validation set are also trained on.

    Why it matters: the validation loss says nothing about new data, and the best checkpoint is the most overfitted one.

    How it is detected: by the sample ids of loaders over one data set (more than 1 % are shared), or by the content of
    the rows that reach the model in training and in evaluations (5 to 95 % are shared). For windows of a series: by
    time steps with equal values, if more than half of those of the evaluation are in training windows at another place.

    Exceptions: reported only with -v if the training set itself is evaluated, or a part of it and another evaluation
    that shares no samples with training. Rows are not compared while training still reads new ones, nor rows of a few
    codes, such as a user and an item. Fewer than 4 equal rows are not reported, and none if the evaluation, or integers
    in training, repeat as often by themselves, unless nearly all repeated rows are trained on and hardly any others
    (copies of an oversampled class).

    Usual cause: the data was not split, the training loader takes all of it, or samples were copied before the split.

    Fix: split once, before anything else, and train on one part only.

        train, val = torch.utils.data.random_split(full, [0.9, 0.1], generator=generator)

    Sources: aestetik PR 12, vc1492a/henosis#12, MakazhanAlpamys/Soup#680, Y-debug-sys/Diffusion-TS#67.
    """
    loaders, rows = run.latest(LoadersFacts), run.latest(RowsFacts)
    overlaps = [each for each in loaders.overlaps if each.samples] if loaders else []
    by_ids = max(overlaps, key=lambda each: each.shared / each.samples, default=None)
    if by_ids is not None and by_ids.shared > MAX_SHARED_FRACTION * by_ids.samples:
        is_meant = by_ids.same_loader or any(each.shared <= MAX_SHARED_FRACTION * each.samples for each in overlaps)
        if loaders is not None and all(each.samples <= by_ids.trained for each in loaders.drawn):  # a full epoch
            is_meant &= by_ids.shared >= MIN_CONTAINED * min(by_ids.samples, by_ids.trained)
        yield _found(run, by_ids.shared, by_ids.samples, "sample id", is_meant)
    elif rows is not None and (last := rows.evaluated) is not None:
        if rows.new_lately > MAX_NEW_FRACTION:
            yield NotApplicable("training still meets new rows")
            return
        repeats = last.rows - last.distinct + (not rows.is_continuous)
        by_chance = CHANCE_MULTIPLE * repeats * last.trained / max(1, last.rows)
        if rows.whole and not rows.is_continuous:  # few tokens in few places: two samples may be equal
            by_chance = max(by_chance, CHANCE_MULTIPLE * (1 - rows.distinct / rows.whole) * last.distinct)
        if last.parts >= MIN_PARTS and last.moved_parts > MAX_MOVED_FRACTION * last.parts and not last.is_partial:
            yield run.finding(
                symptom=f"{last.moved_parts / last.parts:.0%} of the time steps of evaluated windows are in training "
                "windows, too, at another place: the windows overlap",
                cause="windows of one series overlap, and were split at random",
                where=Where(source=last.source),
                evidence=[("evaluated time steps that are trained on", last.moved_parts, 0)],
            )
            return
        is_copied = rows.is_continuous and last.has_copies
        is_too_many = last.shared >= MIN_SHARED_ROWS and (last.shared > by_chance or is_copied)
        if last.is_partial and is_too_many and not rows.are_codes:
            is_meant = last.shared >= MIN_CONTAINED * last.trained
            yield _found(run, last.shared, last.distinct, "content", is_meant, last.source)


def _found(run: RunContext, shared: int, samples: int, by: str, is_meant: bool, source: str | None = None) -> Finding:
    return run.finding(
        severity="info" if is_meant else "warning",
        symptom=f"{shared} of {samples} evaluated samples ({shared / samples:.0%}) are also trained on, by {by}",
        cause="the training set itself is evaluated, too" if is_meant else "",
        where=Where(source=source),
        evidence=[("evaluated samples that are trained on", shared, 0)],
    )
