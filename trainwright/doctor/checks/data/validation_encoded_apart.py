from trainwright.doctor import NotApplicable, Results, RunContext, Where, check
from trainwright.doctor.facts.data import RowsFacts, SplitsFacts

MIN_COLUMNS = 4
MAX_SHARED_FRACTION = 0.05  # Fraction of the evaluated rows that may be training rows
MAX_SHARED_CODES = 0.9  # The same if other codes than those of training may give equal rows
MIN_UNEXPECTED_CODES = 8.0


@check(points_at=("validation", "dataset", "loader"), stage="input", confidence=0.85)
def validation_encoded_apart(run: RunContext, facts: SplitsFacts) -> Results:
    """The scaler or the category codes were computed from the validation data instead of the training data.

    Why it matters: the same value has another meaning there, so the validation loss says nothing about the model.

    How it is detected: in nine of ten columns of the evaluated inputs the mean is 0 (within 1e-5) and the standard
    deviation 1 over exactly these rows. With the statistics of the training set the mean would be off by about 1 /
    sqrt(rows). Or codes of categories are 0, 1, 2, ... without a gap and end before those of training, although the
    frequencies of training predict at least eight codes that do not occur; or, if all of several columns are so, eight
    higher codes that do.

    Exceptions: an evaluation of training rows; fewer than 32 rows or, of numbers, fewer than 4 columns.

    Usual cause: `scaler.fit_transform(x_val)`, or `astype("category").cat.codes` for each split on its own.

    Fix: `scaler.fit(x_train)` once, then `scaler.transform(x_val)`; one `CategoricalDtype` or vocabulary for all.

    Sources: deepchem/deepchem#51, gzerveas/mvts_transformer#26, weecology/DeepForest PR 1147.
    """
    rows = run.latest(RowsFacts)
    evaluated = rows.evaluated if rows is not None else None
    most = MAX_SHARED_CODES if facts.beyond else MAX_SHARED_FRACTION
    if evaluated is None or evaluated.shared > most * evaluated.distinct:
        yield NotApplicable("no rows are evaluated that were not trained on")
        return
    if facts.columns >= MIN_COLUMNS and facts.standardized >= 0.9 * facts.columns:
        yield run.finding(
            symptom=f"{facts.standardized} of {facts.columns} columns of the validation data are standardized by their "
            f"own mean and standard deviation, over exactly {facts.rows} rows",
            cause="the scaler was fitted on the validation data, not on the training data",
            where=Where(shown_at=facts.source),
            evidence=[("columns with mean 0 and deviation 1", facts.standardized, 0)],
        )
    elif max(facts.gaps, facts.beyond) >= MIN_UNEXPECTED_CODES:
        yield run.finding(
            symptom=f"the codes of {facts.gapless} columns of the validation data have no gap and end before those of "
            "training: they were made from the validation data",
            cause="the category codes of the validation data differ from those of training: each split has its own",
            where=Where(shown_at=facts.source),
            evidence=[
                ("codes that should be missing, by the frequencies of training", round(facts.gaps, 1), 0),
                ("higher codes that should occur, by these frequencies", round(facts.beyond, 1), 0),
            ],
        )
