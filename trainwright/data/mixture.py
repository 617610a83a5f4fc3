"""Several datasets mixed by weights: exactly, and as a pure function of (seed, epoch, position)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Sampler

from trainwright.data.sample_order import epoch_order
from trainwright.errors import UsageError

Sized: TypeAlias = Any
"""A dataset with ``__getitem__`` and ``__len__``."""


class MixtureOrder(Sampler[int]):
    """The order in which a mixture visits the samples of several concatenated sets.

    Among the first n samples of an epoch, each set has its fraction of n. The deviation is at most as many samples as
    there are sets. A set is shuffled and visited completely before it is shuffled and visited again, also across
    epochs.
    """

    def __init__(self, sizes: Sequence[int], shares: Sequence[float], length: int, seed: int) -> None:
        self.sizes = [*sizes]
        self.seed = seed
        self.epoch = 0
        whole = np.floor(np.array(shares) * length).astype(np.int64)
        rest = np.argsort(whole - np.array(shares) * length, kind="stable")[: length - int(whole.sum())]
        whole[rest] += 1  # the largest remainders
        self.counts = whole

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return int(self.counts.sum())

    def __iter__(self) -> Iterator[int]:
        return iter(self.positions().tolist())

    def positions(self) -> NDArray[np.int64]:
        """Return the positions that the epoch visits, in order."""
        times = [(np.arange(count) + 0.5) / max(1, count) for count in self.counts]
        chosen = np.concatenate([self._of(source) for source in range(len(self.sizes))])
        return chosen[np.argsort(np.concatenate(times), kind="stable")]

    def _of(self, source: int) -> NDArray[np.int64]:
        """Return the positions of one set that the epoch visits."""
        size, count = self.sizes[source], int(self.counts[source])
        first = self.epoch * count
        passes = range(first // size, (first + count - 1) // size + 1) if count else range(0)
        seed = self.seed + (source + 1) * 0x9E3779B97F4A7C15
        orders = [epoch_order(size, seed=seed, epoch=each) for each in passes]
        start = first - first // size * size
        chosen = np.concatenate(orders)[start : start + count] if orders else np.zeros(0, dtype=np.int64)
        return chosen + sum(self.sizes[:source])


class Mixture(ConcatDataset[Any]):
    """The concatenated datasets, with the order in which they are mixed."""

    def __init__(self, sets: Sequence[Sized], order: MixtureOrder) -> None:
        super().__init__(sets)
        self.order = order


def mix(
    sets: Mapping[str, Sized] | Sequence[Sized],
    weights: Mapping[str, float] | Sequence[float],
    *,
    length: int | None = None,
    seed: int = 0,
) -> Mixture:
    """Mix datasets by weights.

    Args:
        sets: Datasets with ``__getitem__`` and ``__len__``, by name or as a list.
        weights: The weight of each set. Its fraction of an epoch is its weight divided by the sum of all weights.
        length: Number of samples in an epoch; by default the total of all sets.
        seed: Seed of the order.

    Returns:
        A dataset for ``tw.fit``.

    Raises:
        UsageError: The weights do not match the sets.
    """
    if isinstance(sets, Mapping) != isinstance(weights, Mapping):
        raise UsageError(
            "sets and weights are not named alike", remedy="give two dicts with the same keys, or two lists"
        )
    if isinstance(sets, Mapping) and isinstance(weights, Mapping):
        if sets.keys() != weights.keys():
            odd = ", ".join(sorted(map(str, sets.keys() ^ weights.keys())))
            raise UsageError(f"only one of sets and weights has {odd}", remedy="name each set in both")
        weights = [weights[name] for name in sets]
        sets = [*sets.values()]
    assert not isinstance(sets, Mapping) and not isinstance(weights, Mapping)
    sizes = [len(each) for each in sets]
    if len(sets) != len(weights) or not sets or min(weights) < 0 or sum(weights) <= 0 or 0 in sizes:
        raise UsageError(
            f"weights {[*weights]} for sets of {sizes} samples", remedy="give each set a weight from 0 and some samples"
        )
    total = sum(sizes) if length is None else length
    if total < 1:
        raise UsageError(f"an epoch of {total} samples", remedy="give length a positive number")
    return Mixture([*sets], MixtureOrder(sizes, [each / sum(weights) for each in weights], total, seed))
