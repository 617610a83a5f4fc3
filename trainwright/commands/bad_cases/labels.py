"""Which labels are likely wrong: confident learning.

Northcutt, Jiang and Chuang 2021, "Confident Learning: Estimating Uncertainty in Dataset Labels", JAIR 70, arXiv
1911.00068. The predictions must be those of a model that was not trained on these labels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class LabelOrder(NamedTuple):
    """Positions of samples, those whose label is most likely wrong first, and of each whether it is likely wrong."""

    order: NDArray[np.int64]
    likely: NDArray[np.bool_]


def label_order(
    label: NDArray[np.int64], own: NDArray[np.float64], top: NDArray[np.int64], chances: NDArray[np.float64]
) -> LabelOrder:
    """Ranks labels by the probability ``own`` (N,) that a model gives them, and its most probable classes ``top``
    (N, K) with their ``chances``, in descending order. Labels below 0 are left out.

    The threshold of a class is the mean probability that samples of this label get for it (equation 2 of the paper). A
    label is likely wrong where the most probable of the classes that reach their threshold is another one: an entry
    beside the diagonal of the confident joint (equation 1). Among these, and then among all others, the smallest
    probability of the label minus the largest of another class comes first (the normalized margin of section 3.2).
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
