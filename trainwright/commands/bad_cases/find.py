"""Finds bad cases in one pass over a dataset."""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Subset

from trainwright.assembly.assemble import Parts, build_dataset, build_loss, build_model
from trainwright.checkpoint.cursor import Cursor, MicroBatch
from trainwright.commands.bad_cases.scores import CollectedScores, Scores, score
from trainwright.commands.evaluate import batches_of, chosen_model, loss_of
from trainwright.data.fetch import AnyDataset, Failed, Fetch, Key
from trainwright.data.loading import EvaluationBatches, Loading
from trainwright.data.ready_batches import ReadyBatches
from trainwright.data.unwrap import length_of
from trainwright.engine.loss import Loss
from trainwright.errors import RecipeError, StoppedError, UsageError, text_of
from trainwright.recipe import load
from trainwright.recipe.resolve import LIVE, find, is_live
from trainwright.recipe.schema import DEFAULT_BATCH_SIZE
from trainwright.report.bad_cases import NAME, BadCase, BadCases, LossSlice, SamplePreview
from trainwright.report.pages.report import write_report
from trainwright.runs.folder import RunFolder
from trainwright.runs.media import png_of
from trainwright.training.result import Result
from trainwright.training.run import train

MAX_TEXT_CHARS = 300
MAX_COLUMNS = 40
MIN_IMAGE_SIDE = 4
"""Pixels. Smaller arrays are shown as tables."""
CHANNELS = (1, 3, 4)


def each_sample(micro: MicroBatch) -> Iterator[object]:
    """Yield the samples of a batch. Parts that do not have one row per sample are repeated unchanged in each sample."""
    for row in range(micro.size):
        yield _row(micro.data, row, micro.size)


def _row(data: object, row: int, size: int) -> object:
    if isinstance(data, Tensor | np.ndarray):
        return data[row] if data.ndim and data.shape[0] == size else data
    if isinstance(data, Mapping):
        return {key: _row(value, row, size) for key, value in data.items()}
    if isinstance(data, tuple | list):
        if len(data) == size and not any(isinstance(each, Tensor | np.ndarray) for each in data):
            return data[row]
        return tuple(_row(value, row, size) for value in data)
    return data


def inputs_of(sample: object) -> object:
    """Return a sample without its target: the first item of a tuple or list, or a mapping without its labels.

    A list of numbers, such as token ids, has no target. It is returned as a tensor.
    """
    if isinstance(sample, Mapping):
        return {name: each for name, each in sample.items() if name != "labels"}
    if isinstance(sample, list) and sample and all(isinstance(each, int | float) for each in sample):
        return torch.tensor(sample)
    return sample[0] if isinstance(sample, tuple | list) and len(sample) else sample


def samples_of(batches: EvaluationBatches, ids: Collection[int]) -> dict[int, object]:
    """Return the samples at these positions of a dataset. Samples that a stream does not yield again are missing."""
    dataset = batches.steps.dataset
    loading = batches.steps.loading
    wanted = set(ids)
    if not isinstance(dataset, IterableDataset | ReadyBatches):
        positions = np.array(sorted(wanted), dtype=np.int64)
        fetch = Fetch(dataset, seed=loading.seed, collate=loading.collate)
        fetched = fetch[Key(0, 0, positions, True, Cursor())]
        if isinstance(fetched, Failed):
            raise fetched.error()
        found = MicroBatch(fetched.data, fetched.ids)
        return dict(zip(found.ids.tolist(), each_sample(found), strict=True))
    kept: dict[int, object] = {}
    for micro in batches:
        if wanted & set(micro.ids.tolist()):
            kept |= {i: each for i, each in zip(micro.ids.tolist(), each_sample(micro), strict=True) if i in wanted}
        if len(kept) == len(wanted):
            break
    return kept


def known_of(dataset: AnyDataset, name: str) -> object:
    """Return an attribute of a dataset, or of the dataset that it is a subset of; None if there is none."""
    while True:
        found = getattr(dataset, name, None)
        if found is not None or not isinstance(dataset, Subset):
            return found
        dataset = dataset.dataset


def class_names(dataset: AnyDataset, count: int) -> list[str]:
    """Return the class names of a dataset, from the first attribute that lists ``count`` texts, or numbers."""
    for name in ("labels", "classes", "class_names", "vocabulary"):
        found = known_of(dataset, name)
        if isinstance(found, Sequence) and len(found) == count and all(isinstance(each, str) for each in found):
            return [each if each.strip() and each.isprintable() else repr(each) for each in found]
    return [str(number) for number in range(count)]


def shown_sample(sample: object, dataset: AnyDataset, *, side: int) -> SamplePreview:
    """Return the inputs of a sample as a picture of at most ``side`` pixels per side, as text, or as a table."""
    inputs = inputs_of(sample)
    if isinstance(inputs, Mapping):
        texts = [each for each in inputs.values() if isinstance(each, str)]
        images = [each for each in inputs.values() if isinstance(each, Tensor) and _channels_last(each) is not None]
        inputs = images[0] if images else texts[0] if len(texts) == len(inputs) == 1 else inputs
    if isinstance(inputs, np.ndarray):
        inputs = torch.from_numpy(np.ascontiguousarray(inputs))
    if isinstance(inputs, str):
        return SamplePreview("text", inputs[:MAX_TEXT_CHARS])
    if isinstance(inputs, Mapping):
        return SamplePreview("table", _cells({str(key): each for key, each in inputs.items()}))
    if not isinstance(inputs, Tensor):
        return SamplePreview("other", type(inputs).__name__)
    inputs = inputs.detach().cpu()
    if (image_HWC := _channels_last(inputs)) is not None:
        return SamplePreview(
            "image", " x ".join(map(str, inputs.shape)), base64.b64encode(png_of(_pixels(image_HWC, side))).decode()
        )
    if inputs.dim() == 1 and not inputs.is_floating_point() and inputs.dtype != torch.bool:
        return SamplePreview("text", _decoded(inputs, known_of(dataset, "decode"))[:MAX_TEXT_CHARS])
    if inputs.dim() <= 1:
        names = known_of(dataset, "inputs")
        names = names if isinstance(names, Sequence) and len(names) == inputs.numel() else range(inputs.numel())
        return SamplePreview("table", _cells(dict(zip(map(str, names), inputs.flatten().tolist(), strict=True))))
    return SamplePreview("other", f"a tensor of shape {tuple(inputs.shape)}")


def _decoded(ids: Tensor, decode: object) -> str:
    if callable(decode):
        text = decode(ids)
        if isinstance(text, str):
            return text
    return " ".join(map(str, ids.tolist()))


def _cells(row: Mapping[str, object]) -> str:
    cells = []
    for name, value in list(row.items())[:MAX_COLUMNS]:
        if isinstance(value, Tensor | np.ndarray | np.generic):
            value = value.item() if value.ndim == 0 else f"shape {tuple(value.shape)}"
        cells.append(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}")
    more = len(row) - len(cells)
    return (", ".join(cells) + (f", and {more} more" if more else ""))[: 3 * MAX_TEXT_CHARS]


def _channels_last(image: Tensor) -> Tensor | None:
    """Return the image (H, W, C); None for other arrays."""
    if image.dim() == 2 and (image.is_floating_point() or image.dtype == torch.uint8):
        image = image[None]
    if image.dim() != 3 or min(image.shape) < 1:
        return None
    if image.shape[0] in CHANNELS and min(image.shape[1:]) >= MIN_IMAGE_SIDE:
        return image.permute(1, 2, 0)
    return image if image.shape[2] in CHANNELS and min(image.shape[:2]) >= MIN_IMAGE_SIDE else None


def _pixels(image_HWC: Tensor, side: int) -> NDArray[np.uint8]:
    """Return a picture of at most ``side`` pixels per side. Floats outside of 0 to 1 are scaled to their range."""
    image = image_HWC[..., :3].float().nan_to_num(0.0, 0.0, 0.0)
    high, low = float(image.max()), float(image.min())
    if image_HWC.dtype == torch.uint8:
        low, high = 0.0, 255.0
    elif low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    image = (image - low) / (high - low if high > low else 1.0)
    longest = max(image.shape[:2])
    if longest > side:
        high_side, wide_side = (max(1, round(each * side / longest)) for each in image.shape[:2])
        image = F.adaptive_avg_pool2d(image.permute(2, 0, 1), (high_side, wide_side)).permute(1, 2, 0)
    return (image * 255).round().clamp(0, 255).to(torch.uint8).numpy()


Grouping: TypeAlias = str | Callable[[object], object] | Sequence[object]
"""The name of a column, a function of a sample, or the value of each sample in the order of the data."""
MAX_DISTINCT_VALUES = 12
"""A numeric grouping with more distinct values is divided into quantiles."""
NUM_QUANTILES = 4
MAX_SLICES = 50


@dataclass
class Groups:
    """The value of each sample in each grouping. ``columns`` are the names of the columns of the inputs."""

    by: Mapping[str, Grouping]
    columns: Sequence[str] = ()
    _values: dict[str, list[object]] = field(default_factory=dict)

    def watching(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the same batches and record the values of their samples."""
        columns = {name: by for name, by in self.by.items() if isinstance(by, str) or callable(by)}
        for micro in batches:
            for sample in each_sample(micro) if columns else ():
                for name, by in columns.items():
                    value = self._column(sample, by) if isinstance(by, str) else _called(name, by, sample)
                    self._values.setdefault(name, []).append(_plain(value))
            yield micro

    def _column(self, sample: object, name: str) -> object:
        if isinstance(sample, Mapping) and name in sample:
            return sample[name]
        inputs = inputs_of(sample)
        if name in self.columns and isinstance(inputs, Tensor):
            return inputs.flatten()[self.columns.index(name)]
        known = [str(key) for key in sample] if isinstance(sample, Mapping) else [*self.columns]
        remedy = (
            f"it has {', '.join(known)}" if known else "its samples have no named columns; give package.module:callable"
        )
        raise UsageError(f"the data has no column {name!r} to group by", remedy=remedy)

    def named(self, count: int) -> Iterator[tuple[str, list[str]]]:
        """Yield each grouping and, for each sample, the name of its group."""
        for name, by in self.by.items():
            values = self._values.get(name) or [_plain(each) for each in by]  # type: ignore[union-attr]
            if len(values) != count:
                raise UsageError(
                    f"the grouping {name!r} has {len(values)} values for {count} samples",
                    remedy="give one for each sample, in the order of the data",
                )
            yield name, _names(values)


def slices_of(grouping: str, names: Sequence[str], scores: Scores) -> list[LossSlice]:
    """Return the parts of one grouping, the worst first.

    Parts are ordered by ``at_least``, a lower bound of how much their loss exceeds that of all other samples. A part of
    a few samples therefore does not come first by chance.
    """
    counted = scores.weight > 0
    codes = np.array(names, dtype=object)
    right = None if scores.label is None else scores.label == scores.predicted
    found = [_slice(grouping, name, (codes == name) & counted, counted, scores, right) for name in set(names)]
    listed = sorted((each for each in found if each.count), key=lambda each: (-each.at_least, -each.excess, each.name))
    return listed[:MAX_SLICES]


def _slice(
    grouping: str,
    name: str,
    inside: NDArray[np.bool_],
    counted: NDArray[np.bool_],
    scores: Scores,
    right: NDArray[np.bool_] | None,
) -> LossSlice:
    others = counted & ~inside
    count, rest = int(inside.sum()), int(others.sum())
    accuracy = float(right[inside].mean()) if right is not None and count else None
    loss = _mean(scores, inside)
    if not count or not rest:
        return LossSlice(grouping, name, count, loss, 0.0, 0.0, accuracy)
    excess = loss - _mean(scores, others)
    return LossSlice(grouping, name, count, loss, excess, excess - _margin(scores.loss, inside, counted), accuracy)


def _margin(losses: NDArray[np.float64], inside: NDArray[np.bool_], counted: NDArray[np.bool_]) -> float:
    """Return the half width of the 95 % interval of the difference between the means of a part and of all others.

    The standard error uses the larger of the variance of the part and that of all samples, because a few losses may be
    similar by chance. A part of one sample has no finite margin.
    """
    count, rest = int(inside.sum()), int((counted & ~inside).sum())
    if count < 2:
        return float("inf")
    of_all = float(np.std(losses[counted]))
    spread = max(of_all, float(np.std(losses[inside], ddof=1)))
    return _student_t(count - 1) * float(np.sqrt(spread**2 / count + of_all**2 / rest))


def _student_t(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t by the Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5)."""
    z = 1.959964
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def _mean(scores: Scores, some: NDArray[np.bool_]) -> float:
    weight = scores.weight[some].sum()
    return float(scores.total[some].sum() / weight) if weight else float("nan")


def _names(values: Sequence[object]) -> list[str]:
    numbers = [float(each) for each in values if isinstance(each, int | float) and not isinstance(each, bool)]
    if len(numbers) < len(values) or len(set(numbers)) <= MAX_DISTINCT_VALUES:
        return [f"{each:g}" if isinstance(each, float) else str(each) for each in values]
    edges = np.unique(np.quantile(numbers, np.linspace(0, 1, NUM_QUANTILES + 1)))
    which = np.clip(np.searchsorted(edges, numbers, side="right") - 1, 0, len(edges) - 2)
    return [f"{edges[each]:.4g} to {edges[each + 1]:.4g}" for each in which.tolist()]


def _plain(value: object) -> object:
    if isinstance(value, Tensor | np.ndarray | np.generic):
        if value.size != 1 if isinstance(value, np.ndarray) else getattr(value, "numel", lambda: 1)() != 1:
            raise UsageError("a grouping returned an array", remedy="return one name or number for each sample")
        return value.item()
    return value


def _called(name: str, by: Callable[[object], object], sample: object) -> object:
    try:
        return by(sample)
    except Exception as error:
        raise UsageError(
            f"the grouping {name!r} raised {text_of(error)}",
            remedy="write a function of one sample, such as (input, target), that returns a name or a number",
        ) from error


PIXELS_BY_COUNT = ((80, 48), (300, 24))
"""(Maximum number of pictures, pixels per side). These sizes keep ``errors.json`` below one megabyte."""
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
        count: Number of samples in each list. The list of likely wrong labels has twice as many.
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
    groupings = by if isinstance(by, Mapping) else {} if by is None else {_name_of(by): by}
    groups = Groups(groupings, _columns(batches))
    scores = score(chosen.model, loss_of(chosen, loss), groups.watching(batches))
    found = _cases(scores, groups, batches, count)
    is_trained_on = chosen.loaded is not None and data == "train" and bool(found.labels)
    return replace(
        found,
        run="" if chosen.loaded is None else str(of),
        step=chosen.step,
        data=data if isinstance(data, str) else type(batches.steps.dataset).__name__,
        notes=(*found.notes, TRAINED_ON_LABELS_NOTE) if is_trained_on else found.notes,
    )


def errors_of_run(
    run: Path, data: str, *, by: Sequence[str], count: int, which: str, batch: int | None, average: bool
) -> BadCases:
    """Return the bad cases for ``trainwright errors``. They are saved in the run folder and shown in its report."""
    folder = RunFolder.open(run)
    groupings = _found(by, folder)
    return _kept(bad_cases(run, data, by=groupings, count=count, which=which, batch=batch, average=average), folder)


def errors_in_folds(
    run: Path, folds: int, *, by: Sequence[str], count: int, batch: int | None, say: Callable[[str], None]
) -> BadCases:
    """Return the bad cases of the training set for ``trainwright errors --folds``, predicted by cross-validation."""
    folder = RunFolder.open(run)
    trained = CrossValidation(folder, folds, batch, say)
    groups = Groups(_found(by, folder), _columns(trained.batches))
    found = _cases(trained.scores(groups), groups, trained.batches, count)
    return _kept(replace(found, run=str(run), data=f"train, predicted in {folds} folds"), folder)


def _found(by: Sequence[str], folder: RunFolder) -> dict[str, Grouping]:
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


def _name_of(by: Grouping) -> str:
    return by.rpartition(":")[2] if isinstance(by, str) else str(getattr(by, "__name__", "group"))


def _columns(batches: EvaluationBatches) -> Sequence[str]:
    names = known_of(batches.steps.dataset, "inputs")
    return names if isinstance(names, tuple | list) else ()


def _cases(scores: Scores, groups: Groups, batches: EvaluationBatches, count: int) -> BadCases:
    dataset = batches.steps.dataset
    names = class_names(dataset, scores.tally.classes) if scores.tally else []
    suspects = label_order(scores)
    likely = {place for place, is_likely in suspects.items() if is_likely}
    worst = _worst(scores, count)
    mistakes = _mistakes(scores, count)
    labels = list(suspects)[: 2 * count]
    described = {place: _case(scores, place, names, likely) for place in {*worst, *mistakes, *labels}}
    shown = _shown(batches, [described[place].id for place in described])
    tally = scores.tally
    matrix = tally.matrix if tally else ()
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


def _case(scores: Scores, place: int, names: Sequence[str], likely: set[int]) -> BadCase:
    case = BadCase(int(scores.ids[place]), float(scores.loss[place]), likely=place in likely)
    if scores.label is not None and scores.predicted is not None and scores.sure is not None:
        own = float(scores.label_chance[place]) if scores.label_chance is not None else None
        sure = float(scores.sure[place])
        label = int(scores.label[place])
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


def label_order(scores: Scores) -> dict[int, bool]:
    """Map the position of each label to True if it is likely wrong (https://arxiv.org/abs/1911.00068).

    The threshold of a class is the mean probability of this class over the samples with its label (equation 2). The
    guess for a sample is the most probable class among those that reach their threshold. A label is likely wrong if the
    guess is another class, which is an off-diagonal entry of the confident joint (equation 1). Likely wrong labels come
    first, all other labels follow. Both groups are ordered by the normalized margin: the probability of the label minus
    the largest probability of another class (section 3.2). Labels below 0 are left out. Empty for numeric targets.
    """
    label, label_chance, top, chances = scores.label, scores.label_chance, scores.top, scores.chances
    if label is None or label_chance is None or top is None or chances is None:
        return {}
    known = np.flatnonzero(label >= 0)
    label, label_chance, top, chances = label[known], label_chance[known], top[known], chances[known]
    classes = int(max(label.max(initial=0), top.max(initial=0))) + 1
    counts = np.bincount(label, minlength=classes)
    sums = np.bincount(label, weights=label_chance, minlength=classes)
    thresholds = np.where(counts > 0, sums / np.maximum(counts, 1), np.inf)
    reached = np.where(chances >= thresholds[top], chances, -1.0)
    best = reached.argmax(1)
    rows = np.arange(len(label))
    guess = np.where(reached[rows, best] >= 0, top[rows, best], label)
    other = np.where(top == label[:, None], -1.0, chances).max(1)
    likely = guess != label
    order = np.lexsort((label_chance - other, ~likely))
    return dict(zip(known[order].tolist(), likely[order].tolist(), strict=True))


FOLD_SETTINGS = (
    *("data.val=null", "data.more_val=[]", "observers=[]", "metrics=[]"),
    *("log.sinks=[]", "log.doctor=false", "alerts=null"),
    *("checkpoint.every=null", "checkpoint.best=null", "checkpoint.restore_best=false"),
)
"""Settings that reduce the run of a fold to its training."""


class CrossValidation:
    """Trains the recipe of a run ``folds`` times. Each training holds out a different part of the training set.

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
                remedy="leave --folds out; it needs a dataset with a length, whose samples are read by position",
            )
        self._size = size
        rows = batch or DEFAULT_BATCH_SIZE
        self._how = Loading(rows, rows, collate=self._train.collate)
        self.batches = EvaluationBatches(self._train.dataset, self._how)

    def scores(self, groups: Groups) -> Scores:
        """Return the scores of each sample by the model that was not trained on it."""
        part = np.random.default_rng(0).permutation(self._size) % self._folds
        found = CollectedScores()
        for number in range(self._folds):
            self._fold(number, part, found)
        for _ in groups.watching(self.batches):
            pass  # records the values of the groupings, in the order of the data
        return found.scores(by_id=True)

    def _fold(self, number: int, part: NDArray[np.int64], found: CollectedScores) -> None:
        self._say(f"fold {number + 1} of {self._folds}: training on {int((part != number).sum()):,} samples")
        held_out = np.flatnonzero(part == number)
        others = np.flatnonzero(part != number)
        with tempfile.TemporaryDirectory(prefix="trainwright-fold-") as folder:
            overrides = [*FOLD_SETTINGS, f"folder={Path(folder).as_posix()}"]
            loaded = load(self._folder.recipe, overrides=overrides, environ={})
            train_set = replace(self._train, dataset=Subset(self._train.dataset, others.tolist()))
            model, _ = build_model(loaded, self._train)
            result = train(loaded, parts=Parts(model, train_set, {}, build_loss(loaded)), quiet=True)
        if result.state is None or result.ending == "stopped":
            raise StoppedError(f"fold {number + 1} was stopped: {result.reason}", remedy="run it again")
        how = replace(self._how, device=next(result.state.model.parameters()).device)
        batches = EvaluationBatches(Subset(self._train.dataset, held_out.tolist()), how)
        by_id = (MicroBatch(micro.data, held_out[micro.ids]) for micro in batches)
        found.collect(result.state.model, build_loss(loaded), by_id)
