"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import NotApplicable, Passed, Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.data import EvaluatedPart, EvaluatedRows, LoadersFacts, RowsFacts, SharedSamplesFacts

FEW, PART = 0.01, 0.05
"""Fractions of samples, and of rows, that may be in the data twice."""
CHANCE = 2.0
"""Times the rows that are equal by chance."""


@check(stage="input")
def train_val_overlap(run: RunContext) -> Iterator[Result]:
    """Samples of the validation set are also trained on.

    Why it matters: the validation loss says nothing about new data, and the best checkpoint is the one that memorized
    most.

    How it is detected: by the sample ids of loaders over one data set, by the data sets of a run of the engine, or by
    the content of the rows that reach the model in training and in evaluations.

    Exceptions: the training set itself is evaluated, or another evaluation shares nothing (info). While training meets
    new rows, rows are not compared.

    Usual cause: the data was not split, the training loader takes all of it, or samples were copied before the split.

    Fix: split once, before anything else, and train on one part only.

        train, val = torch.utils.data.random_split(full, [0.9, 0.1], generator=generator)

    Sources: aestetik PR 12.
    """
    sets, loaders, rows = run.latest(SharedSamplesFacts), run.latest(LoadersFacts), run.latest(RowsFacts)
    if sets is not None:
        yield _by_sets(run, sets)
        return
    found = [*_by_ids(run, loaders)] if loaders else []
    yield from found or (_by_rows(run, rows) if rows and rows.evaluations else ())


def _by_sets(run: RunContext, facts: SharedSamplesFacts) -> Result:
    if facts.fraction <= FEW or facts.shared <= facts.by_chance:
        return Passed(f"{facts.compared} of {facts.samples} validation samples, by {facts.by}")
    is_same = facts.shared == facts.compared and facts.samples == facts.trained
    about = "" if facts.trained_compared == facts.trained else "about "
    return run.finding(
        max(1, run.last_step),
        severity="info" if is_same else "warning",
        symptom=f"{about}{facts.fraction:.0%} of the validation set is in the training set too, by {facts.by}",
        cause="the training set itself is evaluated" if is_same else "",
        evidence=[
            ("validation samples that are trained on", facts.shared, 0),
            ("validation samples that were compared", facts.compared, facts.samples),
        ],
    )


def _by_ids(run: RunContext, facts: LoadersFacts) -> Iterator[Result]:
    overlaps = [each for each in facts.overlaps if each.samples]
    shared = [each for each in overlaps if each.shared > FEW * each.samples]
    if not shared:
        return
    worst = max(shared, key=lambda each: each.shared / each.samples)
    is_meant = len(shared) < len(overlaps) or worst.same_loader
    yield run.finding(
        run.last_step,
        severity="info" if is_meant else "warning",
        symptom=f"{worst.shared / worst.samples:.0%} of the evaluated samples ({worst.shared}) are also trained on",
        sure=0.4 if is_meant else 0.95,
        evidence=[("shared samples", worst.shared, 0), ("evaluated samples", worst.samples)],
    )


def _by_rows(run: RunContext, facts: RowsFacts) -> Iterator[Result]:
    last = facts.evaluations[-1]
    if facts.new_lately > PART:
        yield NotApplicable("training still meets new rows")
        return
    parts = [each for each in last.parts if _overlaps(each, last, facts) and (each.has_source or _is_mixed(each))]
    if not parts:
        yield Passed(f"{last.rows} evaluated rows")
        return
    worst = max(parts, key=lambda each: each.shared)
    is_same = worst.shared >= (1 - PART) * last.trained
    yield run.finding(
        max(1, facts.steps),
        severity="info" if is_same else "warning",
        symptom=f"{worst.shared} of {worst.distinct} evaluated rows are also trained on, by their content",
        sure=0.85,
        evidence=[("fraction of evaluated rows that are trained on", round(worst.shared / worst.distinct, 3), 0.0)],
    )


def _overlaps(part: EvaluatedPart, last: EvaluatedRows, facts: RowsFacts) -> bool:
    """Whether some rows and not all are trained on, and more than are equal by chance.

    Repeats within the part show how many rows of whole numbers are equal by chance.
    """
    repeats = part.rows - part.distinct + (not facts.is_continuous)
    by_chance = 2.0 * repeats * last.trained / max(1, part.rows)
    return PART * part.distinct < part.shared < (1 - PART) * part.distinct and part.shared > CHANCE * by_chance


def _is_mixed(part: EvaluatedPart) -> bool:
    """Whether calls read both kinds of rows, and not first the ones and then the others."""
    return bool(part.mixed) and not (part.calls >= 4 and part.mixed <= 2)
