"""Computes the loss of parts of a dataset: by label, and by custom groupings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trainwright.checkpoint.cursor import MicroBatch
from trainwright.commands.bad_cases.samples import each_sample, inputs_of
from trainwright.commands.bad_cases.scores import Scores
from trainwright.errors import UsageError, text_of
from trainwright.report.bad_cases import LossSlice

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
        """Yield each grouping with the name of the part of each sample."""
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

    The worst part has the largest lower bound ``at_least`` on the difference of its loss to that of all other samples,
    so that a part of a few samples does not come first by chance.
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
            remedy="it receives one sample of the data, such as (input, target), and must return a name or a number",
        ) from error
