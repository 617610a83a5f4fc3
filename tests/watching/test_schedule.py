"""Which steps are examined, and before which a state is kept."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from trainwright.watching.budget import ExaminationBudget, Examine
from trainwright.watching.schedule import CANDIDATES, EVERY, ExaminationSchedule, SnapshotSchedule

CPU = torch.device("cpu")


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.delenv("TRAINWRIGHT_EXAMINE")
    return Clock()


@pytest.fixture
def budget(clock: Clock) -> ExaminationBudget:
    return ExaminationBudget(CPU, clock=clock)


def train(budget: ExaminationBudget, clock: Clock, seconds: float) -> None:
    clock.now_s += seconds
    budget.train()


def examined(
    clock: Clock, steps: int, step_s: float, overhead_s: float, examine: Examine = "budget", **costs: float
) -> list[int]:
    """The steps that are due in a run of so many; each examination takes ``overhead_s`` alone."""
    budget = ExaminationBudget(CPU, examine, clock)
    schedule, found = ExaminationSchedule(0, budget), []
    for step in range(steps):
        due = schedule.is_next_due(step)
        train(budget, clock, step_s)
        if schedule.wants(step + 1, 1.0, bad=False, spiked=False):
            assert due
            found.append(step + 1)
            with budget.spending():
                clock.now_s += overhead_s
            schedule.plan_next(overhead_s, **costs)
    return found


def test_cheap_examinations_are_made_at_all_candidates_however_fast_the_steps_are(clock: Clock) -> None:
    assert examined(clock, 64, 1e-5, 0.004) == list(CANDIDATES)


def test_an_examination_that_is_not_cheap_waits_until_it_is_earned(clock: Clock) -> None:
    found = examined(clock, 2000, 0.1, 0.5)
    assert found[0] == 1 and all(step * 0.1 * 0.03 >= 0.5 * number for number, step in enumerate(found[1:], 2))


def test_what_waits_for_its_time_is_begun_when_the_budget_has_it(clock: Clock) -> None:
    found = examined(clock, 4000, 0.01, 0.004, wanted_s=1.0, repeated_s=1.0)
    later = [step for step in found if step > CANDIDATES[-1]]
    assert later[0] % EVERY == 1 and 0.03 * later[0] * 0.01 >= 1.0


def test_experiments_that_are_repeated_take_a_small_part(clock: Clock) -> None:
    found = examined(clock, 20000, 0.01, 0.004, repeated_s=0.096)
    later = [step for step in found if step > CANDIDATES[-1]]
    assert later and min(b - a for a, b in pairwise(later)) * 0.01 >= 0.1 / 0.005 - 0.01 * EVERY


def test_a_lifted_budget_examines_all_candidates_whatever_that_takes(clock: Clock) -> None:
    assert examined(clock, 64, 1e-5, 9.0, "all", repeated_s=9.0) == list(CANDIDATES)


def test_a_program_that_has_changed_waits_for_its_time(clock: Clock, budget: ExaminationBudget) -> None:
    schedule = ExaminationSchedule(0, budget)
    with budget.spending():
        clock.now_s += 1.0
    schedule.plan_next(0.01)
    assert not schedule.wants(100, 1.0, bad=False, spiked=False, changed=True)
    train(budget, clock, 100.0)
    assert schedule.wants(101, 1.0, bad=False, spiked=False)
    assert not schedule.wants(102, 1.0, bad=False, spiked=False)


@pytest.mark.parametrize("cost_s", [1e-5, 0.0013, 0.0027, 1.0])
def test_states_are_kept_by_what_they_cost(cost_s: float) -> None:
    snapshots = SnapshotSchedule(32)
    snapshots.paid(cost_s, 0.01)
    due = [step for step in range(1, 400) if snapshots.is_due(step)]
    every = due[1] - due[0]
    assert 4 <= every <= 4 * 32 and (every == 32 or cost_s <= 0.004 * 0.01 * every)
