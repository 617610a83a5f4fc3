"""Checks of schedules, modes and kept states on measurements: faulty and healthy ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.doctor.checks.calls import HEALTHY, fires, steps
from tests.doctor.checks.loops import made_of
from trainwright.doctor.discovery import check_of
from trainwright.doctor.facts.calls import KeptFacts, KeptState
from trainwright.doctor.facts.modes import Drop, DropsFacts, EvalModule, ModesFacts
from trainwright.doctor.facts.schedule import LearningRateFacts, PartFacts, PlateauMetric, SchedulerFacts, Window

ONCE = SchedulerFacts(
    (PartFacts("StepLR", step_size=100.0, gamma=0.1),), 0, 9, (Window(1, 1, 1),) * 8, advanced=8, advanced_once=8
)
PLAIN = LearningRateFacts(
    steps=9, epochs=1, length=100, lrs=((1, 0.1), (5, 0.05)), peak=0.1, zero_steps=0, exhausted=None,
    base=0.1, schedulers=(ONCE,),
)  # fmt: skip


def part(kind: str, **more: object) -> SchedulerFacts:
    return replace(ONCE, parts=(PartFacts(kind, **more),))  # type: ignore[arg-type]


def metrics(mode: str, values: list[float]) -> LearningRateFacts:
    rows = tuple(PlateauMetric(value, 2.0 - 0.2 * n, 0.1 if n < 2 else 0.01) for n, value in enumerate(values))
    return replace(PLAIN, schedulers=(replace(part("ReduceLROnPlateau", mode=mode), metrics=rows),))


@pytest.mark.parametrize(
    ("code", "facts", "expected"),
    [
        ("unit_mismatch", replace(PLAIN, schedulers=(replace(ONCE, windows=(Window(4, 4, 1),) * 8),)), ["warning"]),
        ("unit_mismatch", replace(PLAIN, schedulers=(part("ExponentialLR", gamma=0.9),)), ["warning"]),
        ("unit_mismatch", PLAIN, []),
        ("unit_mismatch",
            replace(PLAIN, schedulers=(replace(ONCE, windows=(Window(2, 1, 2),) * 8),)), ["warning"]),
        ("unit_mismatch",
            replace(PLAIN, schedulers=(replace(ONCE, repeated=3, advanced_once=20),)), ["warning"]),
        ("cosine_climbs", replace(PLAIN, lrs=((1, 0.1), (5, 0.01), (9, 0.05), (12, 0.02)), climbed=(9, 0.01, 0.05),
            schedulers=(part("CosineAnnealingLR", T_max=5.0, last_epoch=12),)), ["warning"]),
        ("cosine_climbs", replace(PLAIN, lrs=((1, 0.1), (5, 0.01), (9, 0.05)),
            schedulers=(part("CosineAnnealingLR", T_max=9.0, last_epoch=9),)), []),
        ("unit_mismatch", replace(PLAIN, steps=12, length=40, lrs=((1, 0.1), (2, 0.09)), schedulers=(replace(
            part("CosineAnnealingLR", T_max=8.0, last_epoch=12), windows=(Window(1, 1, 1),) * 8),)), ["warning"]),
        ("unit_mismatch", replace(PLAIN, steps=12, length=400, lrs=((1, 0.1), (2, 0.09)), schedulers=(replace(
            part("CosineAnnealingLR", T_max=12.0, last_epoch=12), windows=(Window(1, 1, 1),) * 8),)), []),
        ("unit_mismatch", replace(PLAIN, steps=12, length=40, lrs=((1, 0.1), (2, 0.09)), schedulers=(replace(
            part("CosineAnnealingLR", T_max=40.0, last_epoch=2), windows=(Window(1, 1, 1),) * 8),)), []),
        ("cosine_climbs", replace(PLAIN, lrs=((1, 0.1), (5, 0.01), (9, 0.05)),
            schedulers=(part("CosineAnnealingWarmRestarts", last_epoch=9),)), []),
        ("never_stepped", replace(PLAIN, zero_steps=9, schedulers=()), ["critical"]),
        ("never_stepped", replace(PLAIN, lrs=((1, 0.1),), epochs=3, schedulers=(replace(ONCE, calls=0),)), ["warning"]),
        ("never_stepped", PLAIN, []),
        ("plateau_mode", metrics("max", [2.0, 1.5, 1.2, 1.0]), ["warning"]),
        ("plateau_mode", metrics("min", [2.0, 1.5, 1.2, 1.0]), []),
        ("plateau_mode", metrics("min", [0.5, 0.6, 0.7, 0.7, 0.7, 0.7]), ["warning"]),
        ("plateau_mode", metrics("min", [0.5, 0.4, 0.45, 0.5, 0.5, 0.5]), []),
        ("of_other_optimizer", replace(PLAIN, schedulers=(replace(ONCE, is_stray=True, shares=True),)), ["warning"]),
        ("of_other_optimizer", PLAIN, []),
        ("factor_is_rate", replace(PLAIN, base=2e-3, peak=4e-6, lrs=((1, 4e-6), (5, 3e-6)),
            schedulers=(part("LambdaLR"),)), ["critical"]),
        ("factor_is_rate", replace(PLAIN, base=2e-3, peak=4e-6, lrs=((1, 2e-6), (5, 4e-6)),
            schedulers=(part("LambdaLR"),)), []),
        ("factor_is_rate", replace(PLAIN, base=2e-3, peak=2e-3, schedulers=(part("LambdaLR"),)), []),
    ],
)  # fmt: skip
def test_schedules(code: str, facts: LearningRateFacts, expected: list[str]) -> None:
    assert fires(f"schedule.{code}", (9, facts), made=steps(*HEALTHY, count=9)) == expected


DROPOUT = EvalModule("drop", 9, left=True, depends=True, norm=False, container=False, trained=True)
BODY = EvalModule("body", 9, left=True, depends=False, norm=False, container=True, trained=True)
MODES = ModesFacts(20, 2, 1, (False,), (), (), (), 0)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (replace(MODES, roots_in_eval=(True,), eval=(DROPOUT,)), ["critical"]),
        (replace(MODES, eval=(BODY, replace(DROPOUT, module="body.drop"))), ["critical"]),
        (replace(MODES, eval=(DROPOUT,)), ["warning"]),
        (replace(MODES, roots_in_eval=(True,), eval=(replace(DROPOUT, left=False),)), ["warning"]),
        (replace(MODES, eval=(replace(DROPOUT, norm=True),)), []),
        (replace(MODES, eval=(replace(DROPOUT, trained=False),)), []),
        (MODES, []),
    ],
)
def test_trains_in_eval_mode(facts: ModesFacts, expected: list[str]) -> None:
    assert fires("loop.trains_in_eval_mode", (20, facts), made=steps(*HEALTHY)) == expected


def test_evaluations_in_train_mode() -> None:
    code, made = "evaluation.in_train_mode", steps(*HEALTHY)
    assert fires(code, (20, replace(MODES, evaluated_in_train=(10,), num_evaluated_in_train=1)), made=made) == [
        "warning"
    ]
    mixed = replace(MODES, evaluated_in_train=(10,), evaluated_in_eval=(5,), num_evaluated_in_train=1)
    assert fires(code, (20, mixed), made=made) == ["warning"]
    assert fires(code, (20, replace(MODES, evaluated_in_train=(1,), num_evaluated_in_train=20)), made=made) == []
    assert fires(code, (20, replace(MODES, evaluated_in_eval=(10,))), made=made) == []


def test_dropout_and_kept_states() -> None:
    made = steps(*HEALTHY)
    assert fires("evaluation.dropout_ignores_mode", (1, DropsFacts((Drop("body", "dropout"),))), made=made) == [
        "warning"
    ]
    assert fires("evaluation.dropout_ignores_mode", (1, DropsFacts()), made=made) == []
    kept = KeptState(3, 9, "load", "train.py:9")
    assert fires("checkpoint.kept_state_changes", (9, KeptFacts(1, (kept,))), made=made) == ["warning"]
    assert fires("checkpoint.kept_state_changes", (9, KeptFacts(1)), made=made) == []


def test_a_loop_that_makes_no_step_is_reported() -> None:
    check = check_of("loop.unseen")
    assert check is not None
    assert [each.severity for each in made_of(check, steps=[], finished=True)] == ["info"]
    assert made_of(check, steps=steps(*HEALTHY, losses=(2.0,) * 4), finished=True) == []
