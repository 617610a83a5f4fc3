"""The order of samples: a permutation, a function of seed and epoch, and the same in every numpy."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import pytest
import torch

from trainwright.data.sample_order import epoch_order


@pytest.mark.parametrize("size", [0, 1, 2, 257, 10_000])
def test_each_sample_comes_once(size: int) -> None:
    order = epoch_order(size, seed=3, epoch=5)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(size))


def test_seed_and_epoch_decide() -> None:
    first = epoch_order(1000, seed=1, epoch=0)
    assert np.array_equal(first, epoch_order(1000, seed=1, epoch=0))
    others = [epoch_order(1000, seed=seed, epoch=epoch) for seed, epoch in ((1, 1), (2, 0), (0, 1), (-1, 0))]
    for other in others:  # two independent orders agree at one position on average
        assert (first == other).sum() < 10


def test_orders_are_uniform() -> None:
    seats = np.zeros((5, 5))
    for epoch in range(5000):
        seats[np.arange(5), epoch_order(5, seed=0, epoch=epoch)] += 1
    chi_square = ((seats - 1000) ** 2 / 1000).sum()
    assert chi_square < 40  # 16 degrees of freedom: above this with a chance of 1e-3


def test_unshuffled_is_counting() -> None:
    assert epoch_order(4, seed=1, epoch=2, shuffle=False).tolist() == [0, 1, 2, 3]


def test_the_order_is_what_it_was_in_the_first_release() -> None:
    """A change of this hash breaks the resumption of every run made before it."""
    order = epoch_order(1000, seed=42, epoch=7).astype("<i8")
    assert hashlib.sha256(order.tobytes()).hexdigest()[:16] == "152b6daf8e27ad73"


def test_no_global_generator_moves() -> None:
    def states() -> tuple[object, ...]:
        of_numpy: Any = np.random.get_state()
        return random.getstate(), of_numpy[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    epoch_order(1000, seed=1, epoch=1)
    assert states() == before
