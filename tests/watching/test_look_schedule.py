"""How often a step is looked at closely, by what a look costs and how long the run is planned to take."""

from __future__ import annotations

import math

import pytest

from tests.rows import each_row
from trainwright.recorder.engine_changes import EngineChanges
from trainwright.recorder.program_changes import KnownPrograms
from trainwright.watching.look_schedule import LookSchedule, SnapshotSchedule, looks_s


def test_the_time_of_all_looks_is_foretold() -> None:
    # at 1, 2, 3, 4, 6, 8 and 12, then none: 2 % of 100 are spent; the last look; twice 0.4 %
    assert looks_s(0.01, 30, 100.0) == pytest.approx(0.28 * 7 + 0.68 + 0.8)
    # of 1, 2, 3, 4 a half of what is left of 10
    assert looks_s(1.0, 100, 100.0) == pytest.approx(5 + 2.5 + 1.25 + 0.625 + 25 + 0.8)
    assert looks_s(1.0, 100, 100.0, in_seconds=True) == pytest.approx(5 + 2.5 + 1.25 + 0.625 + 5 + 0.8)


@each_row(
    ("cost_s", "planned_s", "in_seconds", "looks", "spent_s"),
    [
        (0.002, 1.0, False, [1, 2, 3, 4, 6], 0.01),
        (9.0, 10.0, False, [1, 2, 3, 4], 4 * 15 / 16),  # a short run is not spent on looks
        (9.0, 10.0, True, [1, 2, 3, 4], 15 / 16),  # least of all where training ends when its seconds are over
        (0.2, 10.0, True, [1, 2, 3, 4], 0.8),
        (9.0, 40.0, True, [1, 2, 3, 4], 4 * 15 / 16),
        (9.0, 90.0, False, [1, 2, 3, 4], 6 * 15 / 16),
        (9.0, math.inf, False, [1, 2, 3, 4, 6], 6.0),  # a loop of which nobody knows how long it takes
    ],
)
def test_the_first_looks_take_a_tenth_of_the_run_at_most(
    cost_s: float, planned_s: float, in_seconds: bool, looks: list[int], spent_s: float
) -> None:
    schedule, now_s, seen = LookSchedule(0, planned_s, in_seconds=in_seconds), 0.0, []
    for step in range(1, 7):
        now_s += 0.01
        if schedule.is_next_due(step - 1, now_s):
            assert schedule.wants(step, 1.0, bad=False, spiked=False)
            schedule.paid(min(cost_s, schedule.allowed_s(step, 0.01)), now_s)
            seen.append(step)
    assert (seen, pytest.approx(schedule.spent_s)) == (looks, spent_s)


def test_the_last_look_takes_a_quarter_of_the_run_at_most() -> None:
    assert LookSchedule(0).last_look_s(600.0) == 150
    assert LookSchedule(0).last_look_s(10.0) == 4  # but what the first looks may take
    assert LookSchedule(0, in_seconds=True).last_look_s(600.0) == 30


def test_the_first_looks_at_a_slow_step_take_as_many_steps() -> None:
    assert LookSchedule(0).allowed_s(1, 2.0) == 100
    assert LookSchedule(0, 600.0).allowed_s(1, 2.0) == 30  # a twentieth of what is planned
    assert LookSchedule(0).allowed_s(5, 2.0) == math.inf  # not one of those that are always looked at: it was wanted


def test_between_two_busy_steps_nothing_is_due() -> None:
    looks, snapshots = LookSchedule(5, 100.0), SnapshotSchedule(32)
    snapshots.paid(80, 1.0, 0.001)
    busy_at = 0
    for step in range(5, 400):
        is_due, is_compared = looks.is_next_due(step, 2.0 * step), KnownPrograms().is_next_due(step - 5)
        if step < busy_at:
            assert not (is_due or is_compared or snapshots.is_due(step)), step
        compared_at = 5 + EngineChanges.next_at(step - 5)
        at_least = step + 1 if is_due or is_compared else compared_at
        busy_at = min(at_least, looks.next_at(step), snapshots.next_at(step))
    assert busy_at == 400


@pytest.mark.parametrize("step", [3, 40, 61, 63, 64, 200])
@pytest.mark.parametrize("cost_s", [1e-5, 0.0013, 0.0027, 1.0])
def test_after_64_steps_a_state_is_kept_where_sixteen_steps_are_closed(step: int, cost_s: float) -> None:
    snapshots = SnapshotSchedule(32)
    snapshots.paid(step, cost_s, 0.01)
    due = next(each for each in range(step + 1, step + 400) if snapshots.is_due(each))
    assert due <= 64 or due % 16 == 0
    assert due - step <= 4 * 32 + 16


@pytest.mark.parametrize("jump_at", [None, 70, 100])
def test_steps_that_are_passed_over_are_taken_as_one_by_one(jump_at: int | None) -> None:
    """And where one of them is wanted, none is taken."""
    at_once, one_by_one = LookSchedule(0), LookSchedule(0)
    losses = {step: 2.0 + 0.3 * math.sin(step) + (9.0 if step == jump_at else 0.0) for step in range(1, 129)}
    wanted = []
    for first in range(1, 129, 16):
        group = {step: losses[step] for step in range(first, first + 16)}
        wanted += [step for step, loss in group.items() if one_by_one.wants(step, loss, bad=False, spiked=False)]
        if not at_once.pass_over(first, list(group.values())):
            assert first == 1 or jump_at in group
            for step, loss in group.items():
                at_once.wants(step, loss, bad=False, spiked=False)
        assert vars(at_once) == vars(one_by_one)
    assert wanted == ([] if jump_at is None else [jump_at])
