"""Finds bad cases in one pass over a dataset."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Subset

from trainwright.assembly.assemble import Parts, build_dataset, build_loss, build_model
from trainwright.checkpoint.cursor import MicroBatch
from trainwright.commands.bad_cases.samples import class_names, known_of, samples_of, shown_sample
from trainwright.commands.bad_cases.scores import CollectedScores, Scores, score
from trainwright.commands.bad_cases.slices import Grouping, Groups, slices_of
from trainwright.commands.chosen_model import batches_of, chosen_model, loss_of
from trainwright.data.loading import EvaluationBatches, Loading
from trainwright.data.unwrap import length_of
from trainwright.engine.loss import Loss
from trainwright.errors import RecipeError, StoppedError, UsageError
from trainwright.recipe import Loaded, load
from trainwright.recipe.resolve import LIVE, find, is_live
from trainwright.recipe.schema import DEFAULT_BATCH_SIZE
from trainwright.report.bad_cases import NAME, BadCase, BadCases, LossSlice, SamplePreview
from trainwright.report.pages.report import write_report
from trainwright.runs.folder import RunFolder
from trainwright.training.result import Result
from trainwright.training.run import train

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


class LabelOrder(NamedTuple):
    """Positions of samples, the most likely wrong label first, and for each True if it is likely wrong."""

    order: NDArray[np.int64]
    likely: NDArray[np.bool_]


def label_order(
    label: NDArray[np.int64], own: NDArray[np.float64], top: NDArray[np.int64], chances: NDArray[np.float64]
) -> LabelOrder:
    """Rank labels by how likely they are wrong. Labels below 0 are left out.

    The threshold of a class is the mean probability of this class over the samples with its label (equation 2 of the
    paper). A label is likely wrong if the most probable of the classes that reach their threshold is another one, that
    is, an off-diagonal entry of the confident joint (equation 1). These labels come first. Within both groups, labels
    are ordered by the normalized margin: the probability of the label minus the largest of another class (section 3.2).

    Args:
        label: Labels (N,).
        own: The probability (N,) that a model gives to each label.
        top: The most probable classes (N, K), in descending order.
        chances: The probabilities (N, K) of these classes.
    """
    known = np.flatnonzero(label >= 0)
    label, own, top, chances = label[known], own[known], top[known], chances[known]
    classes = int(max(label.max(initial=0), top.max(initial=0))) + 1
    counts = np.bincount(label, minlength=classes)
    sums = np.bincount(label, weights=own, minlength=classes)
    thresholds = np.where(counts > 0, sums / np.maximum(counts, 1), np.inf)
    reached = np.where(chances >= thresholds[top], chances, -1.0)
    best = reached.argmax(1)
    rows = np.arange(len(label))
    guess = np.where(reached[rows, best] >= 0, top[rows, best], label)
    other = np.where(top == label[:, None], -1.0, chances).max(1)
    likely = guess != label
    order = np.lexsort((own - other, ~likely))
    return LabelOrder(known[order], likely[order])


FOLD_SETTINGS = (
    *("data.val=null", "data.more_val=[]", "observers=[]", "metrics=[]"),
    *("log.sinks=[]", "log.doctor=false", "alerts=null"),
    *("checkpoint.every=null", "checkpoint.best=null", "checkpoint.restore_best=false"),
)
"""Settings that reduce the run of a fold to its training."""


class FoldedTraining:
    """Trains the recipe of a run once for each of ``folds`` parts of its training set, without that part.

    ``batches`` are the full training set in its order. Raises UsageError for a run of live objects, and for data that
    cannot be read by position.
    """

    def __init__(self, folder: RunFolder, folds: int, batch: int | None, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._folds = folds
        self._say = say
        loaded = load(folder.recipe, environ={})
        live = [part.use for part in (loaded.recipe.model, loaded.recipe.data.train, loaded.recipe.loss)]
        if named := [use for use in live if is_live(use)]:
            raise UsageError(
                f"{named[0].removeprefix(f'{LIVE}:')} of {folder.path} was passed in Python, so no recipe can train "
                "it again",
                remedy="leave --folds out, or train in folds yourself and give tw.bad_cases each model and its part",
            )
        self._train = build_dataset(loaded, "train")
        size = length_of(self._train.dataset)
        if size is None or self._train.own_batches is not None or self._train.order is not None or size < 2 * folds:
            raise UsageError(
                f"the training set of {folder.path} cannot be divided into {folds} folds",
                remedy="leave --folds out; it takes a dataset with a length whose samples are read by position",
            )
        self._size, rows = size, batch or DEFAULT_BATCH_SIZE
        self._how = Loading(rows, rows, collate=self._train.collate)
        self.batches = EvaluationBatches(self._train.dataset, self._how)

    def scores(self, groups: Groups) -> Scores:
        """Return the scores of each sample by the model that was not trained on it."""
        part = np.random.default_rng(0).permutation(self._size) % self._folds
        found = CollectedScores()
        for number in range(self._folds):
            self._fold(number, part, found)
        for _ in groups.watching(self.batches):
            """The values of the groupings, in the order of the data."""
        return found.scores(by_id=True)

    def _fold(self, number: int, part: NDArray[np.int64], found: CollectedScores) -> None:
        self._say(f"fold {number + 1} of {self._folds}: training on {int((part != number).sum()):,} samples")
        mine, others = np.flatnonzero(part == number), np.flatnonzero(part != number)
        with tempfile.TemporaryDirectory(prefix="trainwright-fold-") as folder:
            loaded = self._loaded(folder)
            rest = replace(self._train, dataset=Subset(self._train.dataset, others.tolist()))
            model, _ = build_model(loaded, self._train)
            result = train(loaded, parts=Parts(model, rest, {}, build_loss(loaded)), quiet=True)
        if result.state is None or result.ending == "stopped":
            raise StoppedError(f"fold {number + 1} was stopped: {result.reason}", remedy="run it again")
        how = replace(self._how, device=next(result.state.model.parameters()).device)
        left_out = EvaluationBatches(Subset(self._train.dataset, mine.tolist()), how)
        found.collect(
            result.state.model, build_loss(loaded), (MicroBatch(micro.data, mine[micro.ids]) for micro in left_out)
        )

    def _loaded(self, folder: str) -> Loaded:
        return load(self._folder.recipe, overrides=[*FOLD_SETTINGS, f"folder={Path(folder).as_posix()}"], environ={})
