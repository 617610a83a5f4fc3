"""Counts over all that is classified: how often each class was taken for which, and how sure the model was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from trainwright.report.bad_cases import ConfidenceBin, ConfusedPair

BINS = 15
"""As in Guo et al. 2017."""
MOST_CLASSES = 2048
"""With more of them, what is taken for what is not counted: it would take gigabytes."""
MOST_SHOWN = 20


class Tally:
    """Counts labels, predictions and the probabilities of these, batch by batch."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.confusion = np.zeros((classes, classes) if classes <= MOST_CLASSES else (0, 0), dtype=np.int64)
        self._count, self._sure, self._right = np.zeros(BINS), np.zeros(BINS), np.zeros(BINS)

    def add(self, label: NDArray[np.int64], predicted: NDArray[np.int64], sure: NDArray[np.float64]) -> None:
        """Of each classified thing: its label, the most probable class and its probability."""
        right = label == predicted
        which = np.clip(np.ceil(sure * BINS).astype(np.int64) - 1, 0, BINS - 1)
        for sums, values in ((self._count, None), (self._sure, sure), (self._right, right.astype(np.float64))):
            sums += np.bincount(which, weights=values, minlength=BINS)
        if self.confusion.size:
            pairs = np.bincount(label * self.classes + predicted, minlength=self.classes**2)
            self.confusion += pairs.reshape(self.classes, self.classes)

    @property
    def count(self) -> int:
        return int(self._count.sum())

    @property
    def accuracy(self) -> float | None:
        return float(self._right.sum() / self.count) if self.count else None

    @property
    def bins(self) -> tuple[ConfidenceBin, ...]:
        """Fifteen equal parts of the probabilities from 0 to 1, without the empty ones."""
        return tuple(
            ConfidenceBin(int(count), float(sure / count), float(right / count))
            for count, sure, right in zip(self._count, self._sure, self._right, strict=True)
            if count
        )

    @property
    def ece(self) -> float | None:
        """Expected calibration error: the mean distance between probability and accuracy over the bins.

        Naeini et al. 2015; Guo et al. 2017, arXiv 1706.04599, equation 3.
        """
        if not self.count:
            return None
        return float(np.abs(self._sure - self._right).sum() / self.count)

    def confused(self, names: Sequence[str]) -> Iterator[ConfusedPair]:
        """The pairs that were confused most often."""
        wrong = self.confusion * ~np.eye(len(self.confusion), dtype=np.bool_)
        for place in np.argsort(-wrong, axis=None, kind="stable")[:MOST_SHOWN]:
            label, predicted = divmod(int(place), len(wrong))
            if wrong[label, predicted]:
                yield ConfusedPair(names[label], names[predicted], int(wrong[label, predicted]))

    @property
    def matrix(self) -> tuple[tuple[int, ...], ...]:
        """Empty where there are more classes than can be looked at."""
        if not 0 < len(self.confusion) <= MOST_SHOWN:
            return ()
        return tuple(tuple(row) for row in self.confusion.tolist())
