"""Checks that labels belong to their inputs, by nearest neighbours in the input space, without a model.

The class of a sample is predicted from its nearest neighbours (leave one out; Cover and Hart 1967). If that is no
better than chance but works with the labels of the samples before or after, the labels are shifted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainwright.commands.check.data import majority, not_comparable
from trainwright.commands.check.samples import DatasetSample, thinned
from trainwright.commands.check.verdict import Verdict

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
    if now > base + 4 * _error(base, len(y)):
        return Verdict("ok", "alignment", message), True
    for shift in SHIFTS:
        then = _shifted(train, near, y, shift)
        if then is not None and then > max(now, base) + MIN_ACCURACY_GAIN:
            return _is_shifted(message, shift, then), False
    if val is not None and train.random and (both := _equally_many(train, val)) is not None:
        (here_x, here_y), (there_x, there_y) = both
        here, there = _accuracy(_neighbours(here_x), here_y), _accuracy(_neighbours(there_x), there_y)
        noise = 4 * math.hypot(_error(here, len(here_y)), _error(there, len(there_y)))
        if there > majority(there_y) + MIN_ACCURACY_GAIN and there > here + max(MIN_ACCURACY_GAIN, noise):
            return _destroyed(message, there), False
    return Verdict("cannot tell", "alignment", f"{message}: inputs alone do not decide it"), False


def contradictions(train: DatasetSample) -> Iterator[Verdict]:
    """Yield a verdict on equal inputs with different labels."""
    if train.labels() is None or not_comparable(train):
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
    """Return the arrays of both with the same number of samples, since neighbours are nearer among more samples."""
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


def _accuracy(near: NDArray[np.int64], y: NDArray[np.int64]) -> float:
    """Return the fraction of samples whose class is that of most of their neighbours."""
    classes, codes = np.unique(y, return_inverse=True)
    votes = np.zeros((len(y), len(classes)))
    np.add.at(votes, (np.arange(len(y))[:, None], codes[near]), 1.0)
    return float((votes.argmax(1) == codes).mean())


def _shifted(train: DatasetSample, near: NDArray[np.int64], y: NDArray[np.int64], shift: int) -> float | None:
    """Return the accuracy with the label of the sample ``shift`` places later, as far as it was read."""
    place = {item.id: n for n, item in enumerate(train.items)}
    other = np.array([place.get(item.id + shift, -1) for item in train.items])
    known = other >= 0
    if known.sum() < MIN_SAMPLES:
        return None
    labels = np.where(known, y[other], y)
    classes, codes = np.unique(labels, return_inverse=True)
    votes = np.zeros((len(y), len(classes)))
    np.add.at(votes, (np.arange(len(y))[:, None], codes[near]), 1.0)
    return float((votes.argmax(1) == codes)[known].mean())


def _error(share: float, count: int) -> float:
    """Return the standard error of a fraction."""
    return math.sqrt(share * (1 - share) / count)
