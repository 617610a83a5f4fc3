"""How a run goes beneath its noise: means over equal spans of steps, of all records, in bounded memory.

Rows that were thinned cannot tell: what stays of them are extremes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainwright.report.pages.rows import COLUMNS, Rows, column

MEANT = ("loss", "grad_norm", "step_s", "wait_s")
MOST, DRAWN = 512, 64
LARGEST = 1e200
"""Greater values count as not finite: a sum of them may not be."""
_KERNEL = np.array([0.25, 0.5, 0.25])


class SpanMeans:
    """Sums and counts of the finite values of each span. Where there are more than MOST, each two become one."""

    def __init__(self) -> None:
        self._width = 1
        self._sums, self._counts, self._broken = (np.zeros((MOST, len(MEANT))) for _ in range(3))

    def take(self, rows: Rows) -> None:
        if not len(rows):
            return
        steps = column(rows, "step")
        while steps.max() >= self._width * MOST:
            self._width *= 2
            self._sums, self._counts, self._broken = (_wider(each) for each in (self._sums, self._counts, self._broken))
        span = np.maximum(0, steps // self._width).astype(np.int64)
        values = rows[:, [COLUMNS.index(name) for name in MEANT]]
        finite = np.abs(values) < LARGEST
        np.add.at(self._sums, span, np.where(finite, values, 0.0))
        np.add.at(self._counts, span, finite)
        np.add.at(self._broken, span, np.abs(values) >= LARGEST)

    def go_back_to(self, step: int, rows: Rows) -> None:
        """Forgets what came after ``step``; ``rows`` are those up to it, from which its own span is summed again."""
        first = step // self._width
        for each in (self._sums, self._counts, self._broken):
            each[first:] = 0
        self.take(rows[column(rows, "step") >= first * self._width])

    def columns(self) -> dict[str, NDArray[np.float64]]:
        """The middle of each span that has a record, and the means around it: of it and, by half, of its neighbours.

        NaN: nothing was said there. Infinity: nothing of it was finite.
        """
        sums, counts, broken, width = self._sums, self._counts, self._broken, self._width
        while np.flatnonzero(counts.any(1)).max(initial=0) >= DRAWN:
            sums, counts, broken, width = _wider(sums), _wider(counts), _wider(broken), 2 * width
        seen = counts.any(1) | broken.any(1)
        smooth, weight = _smooth(sums), _smooth(counts)
        means = np.where(counts > 0, smooth / np.maximum(weight, 1e-9), np.where(broken > 0, np.inf, np.nan))
        middles = (np.arange(len(means)) * width + (width - 1) // 2).astype(np.float64)
        return {"step": middles[seen], **{name: means[seen, index] for index, name in enumerate(MEANT)}}


def _wider(spans: NDArray[np.float64]) -> NDArray[np.float64]:
    half = spans[0::2] + spans[1::2]
    return np.concatenate([half, np.zeros_like(half)])


def _smooth(spans: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.stack([np.convolve(each, _KERNEL, mode="same") for each in spans.T], axis=1)
