"""Finds bad cases in one pass over a dataset."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from trainwright.commands.bad_cases.folds import FoldedTraining
from trainwright.commands.bad_cases.labels import label_order
from trainwright.commands.bad_cases.samples import class_names, known_of, samples_of, shown_sample
from trainwright.commands.bad_cases.scores import Scores, score
from trainwright.commands.bad_cases.slices import Grouping, Groups, slices_of
from trainwright.commands.chosen_model import batches_of, chosen_model, loss_of
from trainwright.data.loading import EvaluationBatches
from trainwright.engine.loss import Loss
from trainwright.errors import RecipeError, UsageError
from trainwright.recipe import load
from trainwright.recipe.resolve import find
from trainwright.report.bad_cases import NAME, BadCase, BadCases, LossSlice, SamplePreview
from trainwright.report.pages.report import write_report
from trainwright.runs.folder import RunFolder
from trainwright.training.result import Result

PIXELS_BY_COUNT = ((80, 48), (300, 24))
"""Maximum number of pictures and pixels per side: ``errors.json`` stays below one megabyte."""
TRAINED_ON_LABELS_NOTE = (
    "the model was trained on these labels, so memorized wrong labels look right. "
    "--folds 4 predicts them with models that were not trained on them"
)


def bad_cases(
    of: nn.Module | Result | str | Path,
    data: object = "val",
    loss: Callable[..., Loss | Tensor] | None = None,
    *,
    by: Grouping | Mapping[str, Grouping] | None = None,
    count: int = 20,
    model: nn.Module | None = None,
    which: str | int = "",
    batch: int | None = None,
    average: bool = False,
) -> BadCases:
    """Return the samples of ``data`` that a model predicts worst. ``print`` the result to read it. The model is
    unchanged.

    Args:
        of: A model, the result of ``tw.fit``, or a run folder, whose recipe defines the model.
        data: Any form that ``tw.fit`` accepts. For a run folder also ``"val"``, ``"train"``, the name of a built-in
            dataset, or ``"package.module:callable"``.
        loss: As in ``tw.fit``. None: the loss of the run's recipe, or for a model the loss that it returns itself.
        by: Groups samples to compare their losses: the name of a column, a function of a sample, the value of each
            sample in order, or several of these by name.
        count: Samples in each list; twice as many labels.
        model: For a run folder of ``tw.fit`` with objects: a model of the same architecture, which receives the
            weights.
        which: The checkpoint of a run folder: last, best or a step. Default: the best if there is one, else the last.
        batch: Samples per forward pass.
        average: Use the moving average of the weights of a run folder.

    Returns:
        The worst samples, mistakes, likely wrong labels and losses by group.

    Raises:
        UsageError: The model, checkpoint, data or loss does not exist or cannot be used.
    """
    chosen = chosen_model(of, model, str(which), average=average)
    batches = batches_of(chosen, data, batch)
    groups = Groups(_by_name(by), _columns(batches))
    scores = score(chosen.model, loss_of(chosen, loss), groups.watching(batches))
    found = _cases(scores, groups, batches, count)
    notes = (
        (*found.notes, TRAINED_ON_LABELS_NOTE) if chosen.loaded and data == "train" and found.labels else found.notes
    )
    return replace(
        found,
        run="" if chosen.loaded is None else str(of),
        step=chosen.step,
        data=data if isinstance(data, str) else type(batches.steps.dataset).__name__,
        notes=notes,
    )


def errors_of_run(
    run: Path, data: str, *, by: Sequence[str], count: int, which: str, batch: int | None, average: bool
) -> BadCases:
    """Return the bad cases for ``trainwright errors``. The run folder keeps them and its report shows them."""
    folder = RunFolder.open(run)
    groupings = _found(by, folder)
    return _kept(bad_cases(run, data, by=groupings, count=count, which=which, batch=batch, average=average), folder)


def errors_in_folds(
    run: Path, folds: int, *, by: Sequence[str], count: int, batch: int | None, say: Callable[[str], None]
) -> BadCases:
    """Return the bad cases of the training set for ``trainwright errors --folds``, predicted by cross-validation."""
    folder = RunFolder.open(run)
    trained = FoldedTraining(folder, folds, batch, say)
    groups = Groups(_found(by, folder), _columns(trained.batches))
    found = _cases(trained.scores(groups), groups, trained.batches, count)
    return _kept(replace(found, run=str(run), data=f"train, predicted in {folds} folds"), folder)


def _found(by: Sequence[str], folder: RunFolder) -> dict[str, Grouping]:
    """Return the columns and functions by name."""
    source = load(folder.recipe, environ={}).source
    try:
        return {_name_of(each): find(each, {}, "--by", source) if ":" in each else each for each in by}
    except RecipeError as error:  # the name comes from the command line, not the recipe
        [problem] = error.problems
        raise UsageError(f"--by {problem.got}: {problem.rule}", remedy=problem.remedy) from None


def _kept(found: BadCases, folder: RunFolder) -> BadCases:
    folder.write_text(NAME, json.dumps(found.to_json(), allow_nan=False) + "\n")
    write_report([folder.path])
    return found


def _by_name(by: Grouping | Mapping[str, Grouping] | None) -> Mapping[str, Grouping]:
    if by is None:
        return {}
    return by if isinstance(by, Mapping) else {_name_of(by): by}


def _name_of(by: Grouping) -> str:
    return by.rpartition(":")[2] if isinstance(by, str) else str(getattr(by, "__name__", "group"))


def _columns(batches: EvaluationBatches) -> Sequence[str]:
    names = known_of(batches.steps.dataset, "inputs")
    return names if isinstance(names, tuple | list) else ()


def _cases(scores: Scores, groups: Groups, batches: EvaluationBatches, count: int) -> BadCases:
    dataset = batches.steps.dataset
    names = class_names(dataset, scores.tally.classes) if scores.tally else []
    doubts = _doubts(scores)
    likely = {place for place, is_likely in doubts.items() if is_likely}
    worst, mistakes, labels = _worst(scores, count), _mistakes(scores, count), list(doubts)[: 2 * count]
    described = {place: _case(scores, place, names, likely) for place in {*worst, *mistakes, *labels}}
    shown = _shown(batches, [described[place].id for place in described])
    tally, matrix = scores.tally, scores.tally.matrix if scores.tally else ()
    return BadCases(
        data="",
        count=len(scores.ids),
        loss=scores.mean,
        likely_wrong=len(likely),
        unit=scores.unit,
        accuracy=tally.accuracy if tally else None,
        ece=tally.ece if tally else None,
        worst=tuple(described[place] for place in worst),
        mistakes=tuple(described[place] for place in mistakes),
        labels=tuple(described[place] for place in labels),
        slices=tuple(_slices(scores, groups, names)),
        bins=tally.bins if tally else (),
        confused=tuple(tally.confused(names)) if tally else (),
        classes=tuple(names) if matrix else (),
        matrix=matrix,
        notes=scores.notes,
        shown=shown,
    )


def _worst(scores: Scores, count: int) -> list[int]:
    """Return the positions of the largest losses. A non-finite loss is the largest."""
    counted = np.flatnonzero(scores.weight > 0)
    losses = np.nan_to_num(scores.loss[counted], nan=np.inf)
    found: list[int] = counted[np.argsort(-losses, kind="stable")][:count].tolist()
    return found


def _mistakes(scores: Scores, count: int) -> list[int]:
    if scores.label is None or scores.predicted is None or scores.sure is None:
        return []
    wrong = np.flatnonzero((scores.label != scores.predicted) & (scores.label >= 0))
    found: list[int] = wrong[np.argsort(-scores.sure[wrong], kind="stable")][:count].tolist()
    return found


def _doubts(scores: Scores) -> dict[int, bool]:
    """Return the positions of all labels that may be wrong, the most likely first, and True for each that likely is.

    Empty for numeric targets.
    """
    if scores.label is None or scores.own is None or scores.top is None or scores.chances is None:
        return {}
    found = label_order(scores.label, scores.own, scores.top, scores.chances)
    return dict(zip(found.order.tolist(), found.likely.tolist(), strict=True))


def _case(scores: Scores, place: int, names: Sequence[str], likely: set[int]) -> BadCase:
    case = BadCase(int(scores.ids[place]), float(scores.loss[place]), likely=place in likely)
    if scores.label is not None and scores.predicted is not None and scores.sure is not None:
        own = float(scores.own[place]) if scores.own is not None else None
        sure, label = float(scores.sure[place]), int(scores.label[place])
        label_name = names[label] if label >= 0 else ""
        return replace(case, label=label_name, predicted=names[int(scores.predicted[place])], sure=sure, own=own)
    if scores.values is not None:
        target, output = scores.values[place]
        return replace(case, label=f"{target:.4g}", predicted=f"{output:.4g}")
    return case


def _slices(scores: Scores, groups: Groups, names: Sequence[str]) -> Iterator[LossSlice]:
    for name, values in groups.named(len(scores.ids)):
        yield from slices_of(name, values, scores)
    if scores.label is not None:
        yield from slices_of("label", [names[each] if each >= 0 else "none" for each in scores.label.tolist()], scores)


def _shown(batches: EvaluationBatches, ids: Sequence[int]) -> dict[int, SamplePreview]:
    found = samples_of(batches, ids)
    side = next((side for most, side in PIXELS_BY_COUNT if len(found) <= most), PIXELS_BY_COUNT[-1][1])
    return {each: shown_sample(found[each], batches.steps.dataset, side=side) for each in ids if each in found}
