"""Counts confusions between classes, and the accuracy by predicted probability."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from trainwright.report.bad_cases import ConfidenceBin, ConfusedPair

NUM_BINS = 15
"""Number of probability bins, as in Guo et al. 2017."""
MAX_CLASSES = 2048
"""With more classes, confusions are not counted: the matrix would need gigabytes."""
MAX_PAIRS_SHOWN = 20


class Tally:
    """Counts labels, predictions and their probabilities, batch by batch."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.confusion = np.zeros((classes, classes) if classes <= MAX_CLASSES else (0, 0), dtype=np.int64)
        self._count, self._sure, self._right = np.zeros(NUM_BINS), np.zeros(NUM_BINS), np.zeros(NUM_BINS)

    def add(self, label: NDArray[np.int64], predicted: NDArray[np.int64], sure: NDArray[np.float64]) -> None:
        """Add classified rows: the label, the most probable class and its probability of each."""
        right = label == predicted
        which = np.clip(np.ceil(sure * NUM_BINS).astype(np.int64) - 1, 0, NUM_BINS - 1)
        for sums, values in ((self._count, None), (self._sure, sure), (self._right, right.astype(np.float64))):
            sums += np.bincount(which, weights=values, minlength=NUM_BINS)
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
        """Return the non-empty ones of fifteen equal bins of the probabilities from 0 to 1."""
        return tuple(
            ConfidenceBin(int(count), float(sure / count), float(right / count))
            for count, sure, right in zip(self._count, self._sure, self._right, strict=True)
            if count
        )

    @property
    def ece(self) -> float | None:
        """Return the expected calibration error: the mean distance between probability and accuracy over the bins.

        Naeini et al. 2015; Guo et al. 2017, arXiv 1706.04599, equation 3.
        """
        if not self.count:
            return None
        return float(np.abs(self._sure - self._right).sum() / self.count)

    def confused(self, names: Sequence[str]) -> Iterator[ConfusedPair]:
        """Yield the most frequent confusions."""
        wrong = self.confusion * ~np.eye(len(self.confusion), dtype=np.bool_)
        for place in np.argsort(-wrong, axis=None, kind="stable")[:MAX_PAIRS_SHOWN]:
            label, predicted = divmod(int(place), len(wrong))
            if wrong[label, predicted]:
                yield ConfusedPair(names[label], names[predicted], int(wrong[label, predicted]))

    @property
    def matrix(self) -> tuple[tuple[int, ...], ...]:
        """Return the confusion matrix; empty if it is too large to show."""
        if not 0 < len(self.confusion) <= MAX_PAIRS_SHOWN:
            return ()
        return tuple(tuple(row) for row in self.confusion.tolist())
