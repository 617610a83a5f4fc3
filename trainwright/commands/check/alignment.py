"""Whether labels belong to their inputs: found by nearest neighbours in the input space, without any model.

The class of a sample is predicted from its nearest neighbours (leave one out; Cover and Hart 1967). Where that is no
better than chance, it is tried with the labels of the samples before and after: if that works, labels are shifted.
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
NEIGHBOURS = 5
LEAST, MOST = 64, 1024
SHIFTS = (1, -1, 2, -2)
CLASHES = 0.02
CLEAR = 0.2
"""The gain in accuracy that other labels must give."""


def alignment(train: DatasetSample, val: DatasetSample | None) -> tuple[Verdict, bool] | None:
    """The verdict, and whether inputs are known to predict labels; None where there are no classes."""
    train = thinned(train, MOST)
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
        if then is not None and then > max(now, base) + CLEAR:
            return _is_shifted(message, shift, then), False
    if val is not None and train.random and (both := _equally_many(train, val)) is not None:
        (here_x, here_y), (there_x, there_y) = both
        here, there = _accuracy(_neighbours(here_x), here_y), _accuracy(_neighbours(there_x), there_y)
        noise = 4 * math.hypot(_error(here, len(here_y)), _error(there, len(there_y)))
        if there > majority(there_y) + CLEAR and there > here + max(CLEAR, noise):
            return _destroyed(message, there), False
    return Verdict("cannot tell", "alignment", f"{message}: inputs alone do not decide it"), False


def contradictions(train: DatasetSample) -> Iterator[Verdict]:
    """Equal inputs whose labels differ."""
    if train.labels() is None or not_comparable(train):
        return
    seen: dict[str, tuple[int, int]] = {}
    clash = []
    for item in train.items:
        assert item.target is not None
        first = seen.setdefault(item.digest, (item.id, int(item.target)))
        if first[1] != int(item.target):
            clash.append((first[0], item.id))
    if len(clash) > CLASHES * len(train.items) and len(seen) > 1:
        message = f"{len(clash)} samples have another label than an equal one, such as {clash[0][1]} and {clash[0][0]}"
        yield Verdict("warn", "alignment", message, "look at both: one of the labels is wrong")


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
        "look at augmented samples by eye; weaken or drop what changes the class (crops, flips of digits, noise)",
        code="data.label_feature_misaligned",
    )


def _equally_many(train: DatasetSample, val: DatasetSample) -> tuple[Arrays, Arrays] | None:
    """The arrays of both, of as many samples: neighbours are nearer where there are more of them."""
    most = min(len(train.items), len(val.items), MOST)
    here, there = _arrays(thinned(train, most)), _arrays(thinned(val, most))
    return None if here is None or there is None else (here, there)


def _arrays(samples: DatasetSample) -> Arrays | None:
    """Standardised inputs (n, d) and classes (n,); None where neighbours cannot be compared."""
    x, y = samples.features(), samples.labels()
    if x is None or y is None or len(y) < LEAST or len(np.unique(y)) < 2 or not np.isfinite(x).all():
        return None
    spread = x.std(0)
    if not spread.any() or len(np.unique(y)) > len(y) // 4:
        return None
    return (x - x.mean(0)) / np.where(spread > 0, spread, 1.0), y


def _neighbours(x: NDArray[np.float64]) -> NDArray[np.int64]:
    """Positions (n, k) of each sample's nearest other samples."""
    squared = (x**2).sum(1)
    distance = squared[:, None] + squared[None] - 2 * x @ x.T
    np.fill_diagonal(distance, np.inf)
    k = min(NEIGHBOURS, len(x) - 1)
    return np.argpartition(distance, k - 1, axis=1)[:, :k]


def _accuracy(near: NDArray[np.int64], y: NDArray[np.int64]) -> float:
    """The share of samples whose class most of their neighbours have."""
    classes, codes = np.unique(y, return_inverse=True)
    votes = np.zeros((len(y), len(classes)))
    np.add.at(votes, (np.arange(len(y))[:, None], codes[near]), 1.0)
    return float((votes.argmax(1) == codes).mean())


def _shifted(train: DatasetSample, near: NDArray[np.int64], y: NDArray[np.int64], shift: int) -> float | None:
    """The accuracy if each sample had the label of the one ``shift`` places later, where that one was read."""
    place = {item.id: n for n, item in enumerate(train.items)}
    other = np.array([place.get(item.id + shift, -1) for item in train.items])
    known = other >= 0
    if known.sum() < LEAST:
        return None
    labels = np.where(known, y[other], y)
    classes, codes = np.unique(labels, return_inverse=True)
    votes = np.zeros((len(y), len(classes)))
    np.add.at(votes, (np.arange(len(y))[:, None], codes[near]), 1.0)
    return float((votes.argmax(1) == codes)[known].mean())


def _error(share: float, count: int) -> float:
    """The standard error of a share."""
    return math.sqrt(share * (1 - share) / count)
