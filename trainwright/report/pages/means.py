"""Smoothed curves of a run: means over equal spans of steps, over all records, in bounded memory.

Thinned rows cannot give them, because they keep only extremes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainwright.report.pages.rows import COLUMNS, Rows, column

AVERAGED_COLUMNS = ("loss", "grad_norm", "step_s", "wait_s")
MAX_SPANS, MAX_SPANS_DRAWN = 512, 64
MAX_FINITE = 1e200
"""Greater values count as not finite, because their sum may overflow."""
_KERNEL = np.array([0.25, 0.5, 0.25])


class SpanMeans:
    """Sums and counts of the finite values of each span. Beyond MAX_SPANS, pairs of spans are merged."""

    def __init__(self) -> None:
        self._width = 1
        self._sums, self._counts, self._broken = (np.zeros((MAX_SPANS, len(AVERAGED_COLUMNS))) for _ in range(3))

    def take(self, rows: Rows) -> None:
        if not len(rows):
            return
        steps = column(rows, "step")
        while steps.max() >= self._width * MAX_SPANS:
            self._width *= 2
            self._sums, self._counts, self._broken = (_wider(each) for each in (self._sums, self._counts, self._broken))
        span = np.maximum(0, steps // self._width).astype(np.int64)
        values = rows[:, [COLUMNS.index(name) for name in AVERAGED_COLUMNS]]
        finite = np.abs(values) < MAX_FINITE
        added = ((self._sums, np.where(finite, values, 0.0)), (self._counts, finite))
        for table, each in (*added, (self._broken, np.abs(values) >= MAX_FINITE)):
            for index, weights in enumerate(each.T):
                table[:, index] += np.bincount(span, weights, minlength=MAX_SPANS)

    def go_back_to(self, step: int, rows: Rows) -> None:
        """Drop values after ``step``; ``rows`` are those up to it, from which the span of ``step`` is summed again."""
        first = step // self._width
        for each in (self._sums, self._counts, self._broken):
            each[first:] = 0
        self.take(rows[column(rows, "step") >= first * self._width])

    def columns(self) -> dict[str, NDArray[np.float64]]:
        """Return the middle of each non-empty span, and the mean over it and, with half weight, its two neighbours.

        NaN: no value. Infinity: no finite value.
        """
        sums = self._sums
        counts = self._counts
        broken = self._broken
        width = self._width
        while np.flatnonzero(counts.any(1)).max(initial=0) >= MAX_SPANS_DRAWN:
            sums = _wider(sums)
            counts = _wider(counts)
            broken = _wider(broken)
            width = 2 * width
        seen = counts.any(1) | broken.any(1)
        smooth, weight = _smooth(sums), _smooth(counts)
        for end in (
            np.flatnonzero(counts.any(1))[[0, -1]] if counts.any() else ()
        ):  # a neighbour on one side displaces it
            smooth[end], weight[end] = sums[end], counts[end]
        means = np.where(counts > 0, smooth / np.maximum(weight, 1e-9), np.where(broken > 0, np.inf, np.nan))
        middles = (np.arange(len(means)) * width + (width - 1) // 2).astype(np.float64)
        return {"step": middles[seen], **{name: means[seen, index] for index, name in enumerate(AVERAGED_COLUMNS)}}


def _wider(spans: NDArray[np.float64]) -> NDArray[np.float64]:
    half = spans[0::2] + spans[1::2]
    return np.concatenate([half, np.zeros_like(half)])


def _smooth(spans: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.stack([np.convolve(each, _KERNEL, mode="same") for each in spans.T], axis=1)
