"""The measured speed-up of a remedy: noise does not pass for one, a real one is told."""

from __future__ import annotations

import random
from itertools import chain, repeat

import pytest

from trainwright.profiling.words import MAX_ERROR_PROBABILITY, MIN_ROUNDS, ROUNDS, compare_timings, speed_up


@pytest.mark.parametrize("rounds", [MIN_ROUNDS, ROUNDS, 12])
def test_noise_is_proven_no_more_often_than_it_says(rounds: int) -> None:
    """Ratios of equal things, with a heavy tail: the bound exceeds 1 at most in about MAX_ERROR_PROBABILITY cases."""
    draw = random.Random(0)
    ratios = [
        [draw.lognormvariate(0, 0.3) * draw.choice((1, 1, 1, 3, 1 / 3)) for _ in range(rounds)] for _ in range(4000)
    ]
    above = sum(speed_up(each, [0.1] * rounds).at_least > 1 for each in ratios) / len(ratios)
    assert above <= MAX_ERROR_PROBABILITY + 3 * (MAX_ERROR_PROBABILITY / len(ratios)) ** 0.5


def test_one_bad_block_does_not_hide_a_gain() -> None:
    seen = speed_up([2.0] * (ROUNDS - 1) + [0.2], [0.05] * ROUNDS)
    assert seen.is_proven
    assert seen.median == 2.0


def test_a_gain_that_nobody_would_notice_is_none() -> None:
    assert not speed_up([1.01] * ROUNDS, [0.0] * ROUNDS).is_proven


def test_a_drift_of_the_machine_falls_on_both() -> None:
    """Each block takes a tenth longer than the one before; the second thing takes half the time."""
    calls = iter(range(1000))
    seen = compare_timings(lambda: 1.0 + 0.1 * next(calls), lambda: (1.0 + 0.1 * next(calls)) / 2)
    assert seen.median == pytest.approx(2.0)
    assert seen.at_least == pytest.approx(2.0)


def test_the_spread_of_equal_blocks_is_told() -> None:
    times = chain.from_iterable(repeat([1.0, 1.1], ROUNDS))
    assert compare_timings(lambda: next(times), lambda: 1.0).noise == pytest.approx(0.1)
