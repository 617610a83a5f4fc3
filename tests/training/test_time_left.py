"""The time that is left of a run by the clock, against a run whose steps, evaluations and saves are added up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trainwright.engine.loop import ByTheClock
from trainwright.monitoring.progress import Measured
from trainwright.recipe import from_mapping
from trainwright.training.job import ENDING_S, Job, until_of
from trainwright.training.open_run import seconds_left
from trainwright.training.prepare import prepare
from trainwright.watching.budget import predicted_end_s

pytestmark = [pytest.mark.examined, pytest.mark.slow]
PARTS = {"model": {"use": "mlp", "args": {"sizes": [64, 16, 10]}}, "data": {"train": "digits", "val": "digits"}}
STEPS = 200


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    settings = {"until": f"{STEPS}steps", "evaluation.every": "20steps", "folder": str(tmp_path_factory.mktemp("runs"))}
    yield prepare(from_mapping(PARTS, overrides=list(settings.items())))


def left(job: Job, done: int, measured: Measured, save_s: float | None = 2.0) -> float:
    job.state.step = done
    return seconds_left(job, measured, job.state, until_of(job.plan), save_s)


def whole_of(job: Job) -> float:
    """How many times as long as one in the course of the run the evaluations at its end take."""
    batches = job.measured.evaluation_cost.batches if job.measured.evaluation_cost else None
    part = job.plan.cadence.evaluate_batches
    return 1.0 if not part or not batches else 1.0 + batches / part


@pytest.mark.parametrize("done", [10, 100, 150, 199])
def test_everything_that_follows_is_counted(job: Job, done: int) -> None:
    """An evaluation takes as long as 30 steps: without it the end would be said to come in half of the time."""
    measured = Measured(1.0, 30.0, examination_s=0.1, examined_s=0.0, beside_s=0.25)
    evaluations = sum(step % 20 == 0 for step in range(done + 1, STEPS))
    expected = (STEPS - done) * 1.25 + evaluations * 30.0 + 30.0 * whole_of(job) + 2.0
    examinations = predicted_end_s(STEPS)
    seconds = left(job, done, measured)
    assert expected < seconds <= expected + (STEPS - done) * 0.1 + 68.0 + examinations


def test_each_part_makes_it_longer(job: Job) -> None:
    bare = left(job, 100, Measured(1.0, 0.0, 0.0, 0.0, 0.0), save_s=0.0)
    assert left(job, 100, Measured(1.0, 5.0, 0.0, 0.0, 0.0), save_s=0.0) >= bare + 5 * 5.0
    assert left(job, 100, Measured(1.0, 0.0, 0.02, 0.0, 0.0), save_s=0.0) == pytest.approx(bare + 2.0)
    assert left(job, 100, Measured(1.0, 0.0, 0.0, 0.0, 0.5), save_s=0.0) == pytest.approx(bare + 50.0)
    assert left(job, 100, Measured(1.0, 0.0, 0.0, 0.0, 0.0), save_s=7.0) == pytest.approx(bare + 7.0)
    assert left(job, 100, Measured(1.0, 0.0, 0.0, 0.0, 0.0), save_s=None) == pytest.approx(bare + ENDING_S)


def test_frequent_examinations_at_the_begin_are_not_taken_for_the_rest(job: Job) -> None:
    """They take what is kept for them, not as long as in the first steps for ever."""
    busy = Measured(0.01, 0.0, examination_s=1.0, examined_s=4.0, beside_s=0.0)
    assert left(job, 4, busy) < 30.0


def test_before_the_first_evaluation_the_dry_run_says_what_one_takes(job: Job) -> None:
    assert job.measured.evaluation_cost is not None
    none, dear = (left(job, 10, Measured(1.0, seconds, 0.0, 0.0, 0.0)) for seconds in (None, 50.0))
    assert 190.0 < none < 190.0 + 80.0 < dear


def test_a_run_that_must_be_over_at_some_time_ends_then(job: Job) -> None:
    now_s = iter([10.0, 13.0, 99.0])
    until = ByTheClock(30.0, after_s=4.0, clock=lambda: next(now_s))
    measured = Measured(1.0, 30.0, 0.0, 0.0, 0.0)
    assert seconds_left(job, measured, job.state, until, None) == 27.0
    assert seconds_left(job, measured, job.state, until, None) == 0.0
