"""How often a step is looked at closely, by what a look costs and how long the run is planned to take."""

from __future__ import annotations

import math

import pytest

from tests.rows import each_row
from trainwright.watching.look_schedule import LookSchedule, looks_s


def test_the_time_of_all_looks_is_foretold() -> None:
    assert looks_s(0.01, 30, 100.0) == pytest.approx(0.01 * (9 * 11 + 28) + 0.8)  # of 1, 2, 3, 4, 6, 8, 12, 16, 24
    assert looks_s(1.0, 100, 100.0) == pytest.approx(11 + 28 + 0.8)  # the first one takes the tenth


@each_row(
    ("cost_s", "planned_s", "looks"),
    [
        (0.002, 1.0, [1, 2, 3, 4, 6]),
        (2.0, 10.0, [1, 2]),  # a short run is not spent on looks
        (5.0, 10.0, [1]),
        (2.0, 90.0, [1, 2, 3, 4]),
        (2.0, math.inf, [1, 2, 3, 4]),  # a loop of which nobody knows how long it takes
    ],
)
def test_the_first_looks_take_a_tenth_of_the_run_at_most(cost_s: float, planned_s: float, looks: list[int]) -> None:
    schedule, now_s, seen = LookSchedule(0, planned_s), 0.0, []
    for step in range(1, 7):
        now_s += 0.1
        if schedule.is_next_due(step - 1, now_s):
            assert schedule.wants(step, 1.0, bad=False, spiked=False)
            schedule.paid(cost_s, now_s)
            seen.append(step)
    assert seen == looks
