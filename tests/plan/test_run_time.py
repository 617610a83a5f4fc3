"""How long a run takes by the clock, and how much of it evaluations may take."""

from __future__ import annotations

import time

import pytest

from tests.plan.changed import with_cadence, with_predicted
from trainwright.plan.explain import preflight, time_of_day
from trainwright.plan.make import Plan, RunFacts, make_plan
from trainwright.plan.run_time import (
    EvaluationCost,
    affordable_batches,
    evaluation_note,
    evaluations,
    predicted_seconds,
    skips_full_evaluation,
)
from trainwright.recipe import from_mapping

FACTS = RunFacts(1000, tokens_per_sample=0, parameters=1, trainable=1, device="cpu", device_name="a CPU")


def planned(until: str, every: str, *, step_s: float | None = 0.1, **evaluation: int) -> Plan:
    keys = {"model": "gpt", "data": {"train": "digits"}, "until": until, "evaluation": {"every": every, **evaluation}}
    return with_predicted(make_plan(from_mapping(keys).recipe, FACTS), step_s=step_s)


@pytest.mark.parametrize(
    ("until", "every", "count"),
    [
        ("100steps", "0.1run", 10),
        ("100steps", "25steps", 4),
        ("100steps", "2s", 5),
        ("60s", "0.2run", 5),
        ("60s", "10s", 6),
        ("60s", "100steps", 6),
    ],
)
def test_how_often_a_run_is_evaluated(until: str, every: str, count: float) -> None:
    assert evaluations(planned(until, every)) == pytest.approx(count)


@pytest.mark.parametrize(
    ("until", "every", "batch_s", "batches", "chosen"),
    [
        ("60s", "0.2run", 0.01, 100, 0),  # 1 s each fits into 1.2 s
        ("60s", "0.2run", 0.02, 100, 50),  # 2 s each does not: a half does
        ("60s", "0.2run", 0.1, 100, 7),  # 12 fit: a sixteenth, not an eighth
        ("60s", "0.2run", 100.0, 100, 1),  # never none
        ("60s", "0.2run", 0.1, None, 8),  # a stream
        ("4s", "0.2run", 0.001, 200, 0),  # a second in all is always free
        ("4s", "0.2run", 0.01, 200, 13),
        ("1000steps", "100steps", 0.1, 100, 100 // 16 + 1),  # 10 of 100 s: 1 s each
        ("100steps", "100steps", 9.0, 100, 0),  # only at the end
    ],
)
def test_evaluations_take_a_tenth_of_the_training(
    until: str, every: str, batch_s: float, batches: int | None, chosen: int
) -> None:
    plan, cost = planned(until, every), EvaluationCost(batch_s, batches)
    assert affordable_batches(plan, cost) == chosen


@pytest.mark.parametrize(("batch_s", "chosen"), [(0.001, 0), (0.01, 13), (0.1, 1), (1.0, 1)])
def test_where_a_run_must_be_over_evaluations_take_less(batch_s: float, chosen: int) -> None:
    """0.9 of 60 s, in five evaluations of 100 batches at most."""
    assert affordable_batches(planned("60s", "0.2run"), EvaluationCost(batch_s, 100), 60.0) == chosen


def test_nothing_is_cut_where_no_step_was_timed() -> None:
    plan = planned("1000steps", "100steps", step_s=None)
    assert affordable_batches(plan, EvaluationCost(9.0, 100)) == 0
    assert predicted_seconds(plan, EvaluationCost(9.0, 100), used=0.0) == {}


@pytest.mark.parametrize(
    ("part", "used", "batches"),
    [
        (0, 0.0, 5 * 100),
        (25, 0.0, 5 * 25 + 100),  # at the end the part, which the best is chosen by, and the whole set
        (25, 0.5, 3 * 25 + 100),
        (25, 0.4, 3 * 25 + 100),  # the second evaluation was at 0.4
        (100, 0.0, 5 * 100),  # as many as the recipe asks for, at the end too
    ],
)
def test_the_time_of_the_evaluations_that_are_left(part: int, used: float, batches: int) -> None:
    plan = with_cadence(planned("60s", "0.2run"), evaluate_batches=part)
    seconds = predicted_seconds(plan, EvaluationCost(0.01, 100), used=used)
    assert seconds["training"] == pytest.approx(60 * (1 - used))
    assert seconds["evaluation"] + seconds["evaluation at the end"] == pytest.approx(0.01 * batches)


def test_the_whole_set_is_left_out_where_there_is_no_time_for_it() -> None:
    plan, cost = with_cadence(planned("20s", "0.2run"), evaluate_batches=25), EvaluationCost(0.01, 1000)
    assert skips_full_evaluation(plan, cost, 900.0) and not skips_full_evaluation(plan, cost, 1100.0)
    assert not skips_full_evaluation(with_cadence(plan, evaluate_batches=0), cost, 900.0), "it is evaluated each time"
    without = with_cadence(plan, evaluates_whole=False)
    assert predicted_seconds(without, cost, used=0.0)["evaluation at the end"] == pytest.approx(0.25)
    assert "full set at the end" in evaluation_note(plan, cost).why
    assert "at the end" not in evaluation_note(without, cost).why


def test_the_preflight_says_what_until_counts_and_when_the_run_ends() -> None:
    now_s = time.mktime((2026, 11, 24, 14, 30, 0, 0, 0, -1))
    spent = {"training": 60.0, "evaluation": 5.0, "examinations": 2.7}
    plan = with_predicted(planned("60s", "0.2run"), seconds=spent, step_s=0.01)
    lines = preflight(plan, now_s)
    assert (
        "length      60 s of training: steps and waiting for data; "
        "evaluation, saving, examinations and samples come on top"
    ) in lines
    end = "end         about 14:31:07, after 67.7 s: training 60 s, evaluation 5 s, examinations at most 2.7 s"
    assert end in lines
    (timed,) = [line for line in lines if line.startswith("time ")]
    assert timed.startswith("time        about 10 ms a step, about 6,000 steps in 60 s: a dry run of forward")
    assert timed.endswith("log, doctor and other programs come on top")
    assert not any(line.startswith("end ") for line in preflight(with_predicted(plan, seconds={}), now_s))


def test_another_day_is_named() -> None:
    now_s = time.mktime((2026, 11, 24, 23, 59, 0, 0, 0, -1))
    assert time_of_day(now_s + 59, now_s) == "23:59:59"
    assert time_of_day(now_s + 120, now_s) == "Wed 25 Nov 00:01"
