"""Spikes of the gradient norm are separated from its noise."""

from __future__ import annotations

import math
import random

import pytest

from trainwright.checkpoint.spikes import SpikeDetector


def found(norms: list[float], detector: SpikeDetector | None = None) -> list[int]:
    """Returns the steps of the spikes."""
    detector = detector or SpikeDetector()
    return [step for step, norm in enumerate(norms, 1) if detector.detect(step, norm) is not None]


def noisy(spread: float, steps: int = 400) -> list[float]:
    generator = random.Random(0)
    return [math.exp(generator.gauss(0.0, spread)) for _ in range(steps)]


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.5, 1.0, 1.5])
def test_noise_is_no_spike_however_wide(spread: float) -> None:
    assert found(noisy(spread)) == []


@pytest.mark.parametrize(("spread", "factor"), [(0.0, 8.1), (0.1, 9.0), (0.3, 30.0)])
def test_a_norm_far_above_the_noise_is(spread: float, factor: float) -> None:
    norms = noisy(spread)
    norms[200] = factor
    assert found(norms) == [201]


def test_a_level_that_stays_is_accepted() -> None:
    assert found([1.0] * 40 + [100.0] * 200) == [41, 42, 43, 44]


def test_the_first_steps_are_not_judged() -> None:
    assert found([1.0] * 10 + [1e6] + [1.0] * 30) == []


def test_its_state_goes_on() -> None:
    norms = noisy(0.2)
    norms[150] = norms[158] = 50.0
    first = SpikeDetector()
    found(norms[:140], first)
    second = SpikeDetector()
    second.load_state_dict(first.state_dict())
    assert found(norms[140:], second) == found(norms[140:], first) == [11, 19]
