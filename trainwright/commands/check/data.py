"""Verdicts on the samples of a dataset, before a model sees them.

``alignment`` checks that labels belong to their inputs. The class of a sample is predicted from its nearest neighbours
in the input space (leave one out; Cover and Hart 1967). If that is no better than chance but works with the labels of
the samples before or after, the labels are shifted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from trainwright.commands.check.samples import DatasetSample, thinned
from trainwright.commands.check.verdict import Verdict

IGNORE = -100
MAX_INPUT_RMS = 10.0
"""Root mean square of the inputs above which training suffers."""
MAX_SCALE_RATIO = 1e3
"""Deviation of a column / median deviation of all columns, above which training suffers."""
MIN_DISTINCT_INPUT_VALUES = 8
"""Integer inputs with fewer values are often equal by chance. Rows of token ids need four times as many."""
MAX_OVERLAP = 0.01
"""Fraction of validation samples that are also in the training set, above which there is a warning."""
FAILING_OVERLAP = 0.5
"""The same fraction above which the check fails."""


def readable(train: DatasetSample) -> Iterator[Verdict]:
    """Yield the shape of a sample, and any sample that cannot be read."""
    if train.size is None:
        yield Verdict("cannot tell", "samples", "a stream: its samples are checked in the steps below only")
        return
    if train.failed:
        position, why = train.failed
        leave_out = f"data.quarantine: [{position}]" if train.fatal else "data.on_bad_sample: quarantine"
        remedy = f"open it with dataset[{position}] and repair it, or set {leave_out}"
        yield Verdict("fail", "samples", f"sample {position} cannot be read: {why}", remedy)
        return
    shapes = Counter(" ".join(_shown(x) for x in (*item.inputs, item.target) if x is not None) for item in train.items)
    kind, _ = shapes.most_common(1)[0]
    varied = f", and {len(shapes) - 1} other shapes" if len(shapes) > 1 else ""
    again = "; different at each reading" if train.random else ""
    yield Verdict("ok", "samples", f"{len(train.items):,} of {train.size:,} read: {kind}{varied}{again}")


def _shown(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{tuple(x.shape)}"


def finite(train: DatasetSample) -> Iterator[Verdict]:
    """Yield a verdict on samples with NaN or infinity in inputs or targets."""
    bad = [item.id for item in train.items if any(x is not None and _is_bad(x) for x in (*item.inputs, item.target))]
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        yield Verdict(
            "fail",
            "values",
            f"NaN or infinity in {len(bad)} of {len(train.items):,} samples: {', '.join(map(str, bad[:5]))}{more}",
            "repair them at the source, or leave them out with data.quarantine; each would cause a skipped step",
            code="data.nonfinite_input",
        )


def _is_bad(x: torch.Tensor) -> bool:
    """Return True for NaN or plus infinity. Minus infinity is used in masks."""
    return bool(x.isnan().any() or x.isposinf().any()) if x.is_floating_point() else False


def scale(train: DatasetSample, *, normalised_inside: bool) -> Iterator[Verdict]:
    """Check that inputs vary, and that their scale suits training. ``normalised_inside``: the model begins with a norm
    layer.
    """
    x, ids = train.features(), (torch.int32, torch.int64)
    if x is None or len(x) < 4 or not np.isfinite(x).all():
        return
    if all(each is None or each.dtype in ids for item in train.items for each in item.inputs):
        return  # ids of an embedding
    spread = x.std(0)
    if not spread.any() and _targets_vary(train):
        yield Verdict(
            "fail",
            "inputs",
            f"all {len(x)} samples have the same input, with different targets",
            "print one sample right after loading: fractions that were stored as integers are all 0",
            code="data.constant_input",
        )
        return
    size, mean, std = float(np.sqrt((x**2).mean())), float(x.mean()), float(x.std())
    message = f"mean {mean:.3g}, deviation {std:.3g}, from {x.min():.3g} to {x.max():.3g}"
    living = spread[spread > 0]
    uneven = float(living.max() / np.median(living)) if len(living) > 1 else 1.0
    if normalised_inside:
        yield Verdict("ok", "inputs", f"{message}; the model normalises them first")
    elif size > MAX_INPUT_RMS:
        bytes_ = x.min() >= 0 and 1 < x.max() <= 255 and bool((x == x.round()).all())
        remedy = "divide by 255 and subtract the mean" if bytes_ else "subtract the mean and divide by the deviation"
        yield Verdict("warn", "inputs", f"not normalised: {message}", f"{remedy}, once", "data.unnormalised_input")
    elif uneven > MAX_SCALE_RATIO:
        message = f"one column varies {uneven:.2g} times as much as the usual one"
        yield Verdict("warn", "inputs", message, "standardise each column by its own mean and deviation")
    elif std < 0.02 and abs(mean) > 5 * std:
        remedy = "normalise once: most often the dataset does it and a transform does it again"
        yield Verdict("warn", "inputs", f"hardly vary: {message}", remedy, "data.unnormalised_input")
    else:
        yield Verdict("ok", "inputs", message)


def _targets_vary(train: DatasetSample) -> bool:
    targets = [item.target for item in train.items if item.target is not None]
    return any(t.shape != targets[0].shape or not torch.equal(t, targets[0]) for t in targets)


def labels(train: DatasetSample, classes: int | None, ignored: int = IGNORE) -> Iterator[Verdict]:
    """Check the range and balance of labels. ``classes`` is the number of outputs of the model; None if unknown."""
    seen = train.labels()
    if seen is None:
        yield from _real_targets(train)
        yield from _dense_targets(train, classes, ignored)
        return
    counted = seen[seen != ignored]
    ids = [item.id for item in train.items]
    wrong = [n for n, y in enumerate(seen) if y != ignored and (y < 0 or (classes is not None and y >= classes))]
    if wrong:
        upto = "counted from 0" if classes is None else f"0 to {classes - 1}"
        from_one = classes is not None and counted.min() == 1 and counted.max() == classes
        yield Verdict(
            "fail",
            "labels",
            f"{len(wrong)} of {len(seen):,} are out of range: sample {ids[wrong[0]]} has {seen[wrong[0]]}, "
            f"labels must be {upto}",
            "subtract 1: they count from 1" if from_one else "number them from 0, or give the model more outputs",
            code="data.label_out_of_range",
        )
        return
    if not len(counted):
        yield Verdict(
            "fail", "labels", f"every label is {ignored}, which the loss ignores", "label what the model should learn"
        )
        return
    values, counts = np.unique(counted, return_counts=True)
    message = f"{len(values)} classes, {values[0]} to {values[-1]}; the largest has {counts.max() / len(counted):.0%}"
    if len(values) == 1 and len(counted) >= 32:
        remedy = "check how labels are read; of a sorted dataset, that all of it is"
        yield Verdict("fail" if train.is_complete else "warn", "labels", f"all {len(counted)} are {values[0]}", remedy)
    else:
        yield Verdict("ok", "labels", message)


def _dense_targets(train: DatasetSample, classes: int | None, ignored: int) -> Iterator[Verdict]:
    """Check targets with a class for each token or pixel."""
    targets = [(item.id, item.target) for item in train.items if item.target is not None]
    if classes is None or not targets or any(y.dtype != torch.int64 or y.numel() < 2 for _, y in targets):
        return
    for position, y in targets:
        wrong = y[(y != ignored) & ((y < 0) | (y >= classes))]
        if len(wrong):
            message = f"sample {position} has {int(wrong[0])} among its targets, they must be 0 to {classes - 1}"
            remedy = f"give the model more outputs, or repair the data; the target to leave out is {ignored}"
            yield Verdict("fail", "labels", message, remedy, "data.label_out_of_range")
            return
    yield Verdict("ok", "labels", f"{sum(y.numel() for _, y in targets):,} targets lie within 0 to {classes - 1}")


def ids_fit(train: DatasetSample, rows: int | None) -> Iterator[Verdict]:
    """Check that the embedding of the model's first input has a row for each id."""
    if rows is None or not train.has_token_ids:
        return
    for item in train.items:
        ids = item.inputs[0]
        if ids.numel() and not 0 <= (worst := int(ids.max() if ids.max() >= rows else ids.min())) < rows:
            message = f"sample {item.id} has id {worst}, the embedding has rows 0 to {rows - 1}"
            remedy = "give the model the vocabulary of the tokenizer, special tokens included"
            yield Verdict("fail", "inputs", message, remedy)
            return
    yield Verdict("ok", "inputs", f"all ids lie within the {rows:,} rows of the embedding")


def _real_targets(train: DatasetSample) -> Iterator[Verdict]:
    y = train.numbers()
    if y is None or not np.isfinite(y).all():
        return
    mean, std = float(y.mean()), float(y.std())
    message = f"real numbers, mean {mean:.3g}, deviation {std:.3g}"
    if len(y) >= 4 and not y.std(0).any():
        remedy = "check how targets are read: there is nothing to learn"
        yield Verdict("fail" if train.is_complete else "warn", "targets", f"all are the same: {message}", remedy)
    elif max(abs(mean), std) > 100:
        yield Verdict("warn", "targets", message, "standardise the targets, and undo it after predicting")
    else:
        yield Verdict("ok", "targets", message)


def repeated(train: DatasetSample) -> Iterator[Verdict]:
    """Yield a verdict on samples that occur in the training set more than once."""
    if len(train.items) < 8 or _why_not_comparable(train):
        return
    counts = Counter(item.digest for item in train.items)
    twice = sum(n - 1 for n in counts.values())
    if twice > MAX_OVERLAP * len(train.items) and len(counts) > 1:
        first = next(digest for digest, n in counts.items() if n > 1)
        where = [item.id for item in train.items if item.digest == first][:2]
        yield Verdict(
            "warn",
            "duplicates",
            f"{twice / len(train.items):.0%} of the samples repeat an earlier one, such as {where[1]}, which equals "
            f"{where[0]}",
            "remove them before the split: they weigh more, and end up on both sides of it",
        )
    elif len(counts) > 1:
        yield Verdict("ok", "duplicates", f"{twice} among {len(train.items):,} samples")


def _why_not_comparable(samples: DatasetSample) -> str:
    """Return the reason why equal inputs prove nothing; "" if there is none."""
    first = samples.items[0].inputs if samples.items else ()
    if samples.random:
        return "samples are different at each reading"
    size = sum(x.numel() for x in first)
    parts = (x for item in samples.items for x in item.inputs)
    if all(not x.is_floating_point() or bool((x == x.round()).all()) for x in parts) and size < (
        4 * MIN_DISTINCT_INPUT_VALUES if samples.has_token_ids else MIN_DISTINCT_INPUT_VALUES
    ):
        return "inputs of so few values are often equal"
    return "" if size else "inputs are not tensors"


def overlap(train: DatasetSample, val: DatasetSample | None) -> Iterator[Verdict]:
    """Yield a verdict on validation samples that are also in the training set."""
    if val is None:
        remedy = "hold some samples out and name them in data.val: overfitting is not visible otherwise"
        yield Verdict("warn", "validation", "there is no validation set", remedy)
        return
    if val.failed:
        message = f"sample {val.failed[0]} of the validation set cannot be read: {val.failed[1]}"
        yield Verdict("fail", "validation", message, "open it with dataset[i] and repair it")
        return
    if train.size is None or val.size is None or not train.items or not val.items:
        yield Verdict("cannot tell", "validation", "overlap with the training set: one of them is a stream")
        return
    if why := _why_not_comparable(train) or _why_not_comparable(val):
        yield Verdict("cannot tell", "validation", f"overlap with the training set: {why}")
        return
    yield _overlap(train, val)


def _overlap(train: DatasetSample, val: DatasetSample) -> Verdict:
    """Return the verdict. The fraction is scaled up if only a part of the training set was read."""
    known = {item.digest: item.id for item in train.items}
    both = [item for item in val.items if item.digest in known]
    covered = len(train.items) / (train.size or 1)
    fraction = min(1.0, len(both) / len(val.items) / covered)
    by_chance = 0.0  # rows that are frequent in the data occur in both sets, and in any part of them that is read
    if not train.is_complete:
        twice = len(train.items) - len(known)
        by_chance = 4 * twice * len(val.items) / len(train.items) + 2
    if len(both) >= 2 and fraction > MAX_OVERLAP and len(both) > by_chance:
        first = both[0]
        about = "" if train.is_complete else "about "
        return Verdict(
            "fail" if fraction > FAILING_OVERLAP else "warn",
            "validation",
            f"{about}{fraction:.0%} of its samples are in the training set too: {first.id} is {known[first.digest]} "
            "there",
            "split before anything else, by source (patient, document) and not by sample",
            code="data.train_val_overlap",
        )
    return Verdict("ok", "validation", f"{len(val.items):,} of {val.size:,} samples read, {len(both)} also in training")


def batch_fits(
    train: DatasetSample, size: int, micro: int, *, drop_last: bool, has_batch_norm: bool
) -> Iterator[Verdict]:
    """Check that the dataset fills a batch, and that batch norm never gets a single sample."""
    if train.size is None:
        return
    last = 0 if drop_last else (train.size % size) % micro
    if size > train.size:
        message = f"a batch of {size} is larger than the training set ({train.size}): each step sees all of it"
        remedy = f"set batch.size to {train.size} or less"
        yield Verdict("fail" if drop_last else "warn", "batch size", message, remedy)
    if has_batch_norm and (micro == 1 or last == 1):
        which = "micro-batches" if micro == 1 else "the last micro-batch of each epoch"
        yield Verdict(
            "fail" if micro == 1 else "warn",
            "batch norm",
            f"{which} have 1 sample: there is no variance to divide by",
            "take batch.micro of 8 or more, or GroupNorm" if micro == 1 else "set data.drop_last: true",
            code="model.bn_tiny_batch",
        )


def majority(labels: NDArray[np.int64]) -> float:
    """Return the accuracy of always predicting the most frequent class."""
    return float(np.unique(labels, return_counts=True)[1].max() / len(labels))


def entropy(labels: NDArray[np.int64], ignored: int = IGNORE) -> float:
    """Return the entropy of the class frequencies in nats, without the label ``ignored``."""
    counted = labels[labels != ignored]
    frequencies = np.unique(counted, return_counts=True)[1] / max(1, len(counted))
    return float(-(frequencies * np.log(frequencies)).sum())


Arrays: TypeAlias = tuple[NDArray[np.float64], NDArray[np.int64]]
NUM_NEIGHBOURS = 5
MIN_SAMPLES = 64
MAX_SAMPLES = 1024
SHIFTS = (1, -1, 2, -2)
MAX_CLASH_FRACTION = 0.02
MIN_ACCURACY_GAIN = 0.2
"""The gain in accuracy that shifted labels must give."""


def alignment(train: DatasetSample, val: DatasetSample | None) -> tuple[Verdict, bool] | None:
    """Return the verdict, and True if inputs are known to predict labels; None for data without classes."""
    train = thinned(train, MAX_SAMPLES)
    arrays = _arrays(train)
    if arrays is None:
        return None
    x, y = arrays
    near, base = _neighbours(x), majority(y)
    now = _accuracy(near, y)
    message = f"nearest neighbours predict {now:.0%} of the labels, chance {base:.0%}"
    if now > base + 4 * _standard_error(base, len(y)):
        return Verdict("ok", "alignment", message), True
    for shift in SHIFTS:
        then = _shifted(train, near, y, shift)
        if then is not None and then > max(now, base) + MIN_ACCURACY_GAIN:
            return _is_shifted(message, shift, then), False
    if val is not None and train.random and (both := _equally_many(train, val)) is not None:
        (here_x, here_y), (there_x, there_y) = both
        here, there = _accuracy(_neighbours(here_x), here_y), _accuracy(_neighbours(there_x), there_y)
        noise = 4 * math.hypot(_standard_error(here, len(here_y)), _standard_error(there, len(there_y)))
        if there > majority(there_y) + MIN_ACCURACY_GAIN and there > here + max(MIN_ACCURACY_GAIN, noise):
            return _destroyed(message, there), False
    return Verdict("cannot tell", "alignment", f"{message}: inputs alone do not decide it"), False


def contradictions(train: DatasetSample) -> Iterator[Verdict]:
    """Yield a verdict on equal inputs with different labels."""
    if train.labels() is None or _why_not_comparable(train):
        return
    seen: dict[str, tuple[int, int]] = {}
    clash = []
    for item in train.items:
        assert item.target is not None
        first = seen.setdefault(item.digest, (item.id, int(item.target)))
        if first[1] != int(item.target):
            clash.append((first[0], item.id))
    if len(clash) > MAX_CLASH_FRACTION * len(train.items) and len(seen) > 1:
        message = (
            f"{len(clash)} samples have a different label than an equal sample, such as {clash[0][1]} and {clash[0][0]}"
        )
        yield Verdict("warn", "alignment", message, "open both: one of the labels is wrong")


def _is_shifted(message: str, shift: int, then: float) -> Verdict:
    which = f"{abs(shift)} {'before' if shift < 0 else 'after'} it"
    return Verdict(
        "fail",
        "alignment",
        f"labels are shifted: {message}, but {then:.0%} with the label of the sample {which}",
        "pair inputs and labels by name or id: one list has a row more, or was sorted or shuffled alone",
        code="data.label_feature_misaligned",
    )


def _destroyed(message: str, there: float) -> Verdict:
    return Verdict(
        "fail",
        "alignment",
        f"{message}; in the validation set they predict {there:.0%}: augmentation hides the class",
        "view augmented samples; weaken or drop what changes the class (crops, flips of digits, noise)",
        code="data.label_feature_misaligned",
    )


def _equally_many(train: DatasetSample, val: DatasetSample) -> tuple[Arrays, Arrays] | None:
    """Return the arrays of both sets, thinned to one size, because the neighbours in a larger set are nearer."""
    most = min(len(train.items), len(val.items), MAX_SAMPLES)
    here, there = _arrays(thinned(train, most)), _arrays(thinned(val, most))
    return None if here is None or there is None else (here, there)


def _arrays(samples: DatasetSample) -> Arrays | None:
    """Return standardised inputs (n, d) and classes (n,); None if neighbours cannot be compared."""
    x, y = samples.features(), samples.labels()
    if x is None or y is None or len(y) < MIN_SAMPLES or len(np.unique(y)) < 2 or not np.isfinite(x).all():
        return None
    spread = x.std(0)
    if not spread.any() or len(np.unique(y)) > len(y) // 4:
        return None
    return (x - x.mean(0)) / np.where(spread > 0, spread, 1.0), y


def _neighbours(x: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the positions (n, k) of each sample's nearest other samples."""
    squared = (x**2).sum(1)
    distance = squared[:, None] + squared[None] - 2 * x @ x.T
    np.fill_diagonal(distance, np.inf)
    k = min(NUM_NEIGHBOURS, len(x) - 1)
    return np.argpartition(distance, k - 1, axis=1)[:, :k]


def _accuracy(near: NDArray[np.int64], y: NDArray[np.int64], some: NDArray[np.bool_] | None = None) -> float:
    """Return the fraction of the samples ``some`` (None: all) whose class is the most frequent one among their
    neighbours.
    """
    classes, codes = np.unique(y, return_inverse=True)
    votes = np.zeros((len(y), len(classes)))
    np.add.at(votes, (np.arange(len(y))[:, None], codes[near]), 1.0)
    right = votes.argmax(1) == codes
    return float((right if some is None else right[some]).mean())


def _shifted(train: DatasetSample, near: NDArray[np.int64], y: NDArray[np.int64], shift: int) -> float | None:
    """Return the accuracy if each sample gets the label of the sample ``shift`` places later, where that was read."""
    place = {item.id: n for n, item in enumerate(train.items)}
    other = np.array([place.get(item.id + shift, -1) for item in train.items])
    known = other >= 0
    if known.sum() < MIN_SAMPLES:
        return None
    return _accuracy(near, np.where(known, y[other], y), known)


def _standard_error(fraction: float, count: int) -> float:
    return math.sqrt(fraction * (1 - fraction) / count)
