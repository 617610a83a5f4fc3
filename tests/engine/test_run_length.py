"""A run that must be over at some time by the clock, with all that comes between and after its steps."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.loop import ByTheClock


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def walked(
    within_s: float, after_s: float, pauses: dict[int, float], *, step_s: float, before_s: float = 0.0
) -> list[float]:
    """The shares before each step of a run with these pauses after steps. The last number is the clock."""
    clock, model = Clock(), nn.Linear(1, 1)
    state, until = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1)), ByTheClock(within_s, after_s, clock)
    clock.now_s += before_s
    shares = [until(state)]
    while shares[-1] < 1.0:
        clock.now_s += step_s
        state.elapsed_s, state.step = state.elapsed_s + step_s, state.step + 1
        clock.now_s += pauses.get(state.step, 0.0)
        shares.append(until(state))
    return [*shares, clock.now_s]


def test_the_last_step_leaves_time_for_what_comes_after_it() -> None:
    *shares, now_s = walked(20.0, 3.0, {1: 2.0, 5: 1.0}, step_s=0.1, before_s=0.5)
    assert now_s == pytest.approx(120 - 3 - 0.5 - 2, abs=0.2), "as long as the first pause and the longest are kept"
    assert shares == sorted(shares) and shares[0] == 0.0 and shares[-1] == 1.0
    assert max(after - before for before, after in pairwise(shares)) < 0.1, "a pause is no jump"


def test_a_pause_takes_from_the_training_and_not_from_the_share() -> None:
    without, with_one = (walked(20.0, 0.0, pauses, step_s=0.1) for pauses in ({}, {50: 3.0}))
    assert with_one[:50] == without[:50]
    assert with_one[51] == pytest.approx(5.0 / (20 - 3 - 3), abs=0.02)  # 14 s of training instead of 20
    assert with_one[-1] == pytest.approx(117.0, abs=0.2)


def test_where_no_time_is_left_it_trains_for_a_second() -> None:
    *shares, now_s = walked(2.0, 3.0, {}, step_s=0.125)
    assert now_s == 101.0 and len(shares) == 9
