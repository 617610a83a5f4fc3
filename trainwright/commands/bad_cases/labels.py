"""Finds labels that are likely wrong, by confident learning.

Northcutt, Jiang and Chuang 2021, "Confident Learning: Estimating Uncertainty in Dataset Labels", JAIR 70, arXiv
1911.00068. The predictions must be those of a model that was not trained on these labels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


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
