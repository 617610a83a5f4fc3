"""Checks of calls and updates on records: each fires on its mechanism and is silent on what looks like it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.doctor.checks.calls import CARRIED, HEALTHY, B, F, S, Z, fires, steps
from tests.doctor.checks.data.loops import exam
from trainwright.doctor.context import RunContext
from trainwright.doctor.discovery import check_of
from trainwright.doctor.facts.calls import CallsFacts, GroupFacts, OptimizerFacts, ScaledClip, ScalerFacts
from trainwright.doctor.facts.loss import AccumulationFacts
from trainwright.doctor.facts.weights import BatchStepsFacts, LoadedMomentsFacts, UpdateFacts, WeightsFacts
from trainwright.doctor.finding import Finding


def clip(at: float = 1.0, norm: float = 5.0, parameters: int = 6) -> tuple[str, dict[str, Any]]:
    return ("clip", {"by": "norm", "at": at, "norm": norm, "parameters": parameters})


GROUP = GroupFacts(parameters=6, with_grad=6, lr=0.1)
CALLS = CallsFacts(optimizers=(OptimizerFacts(6, 0, (GROUP,)),), carried=(0.0,))
UPDATE = UpdateFacts(
    loss=2.0, after=1.9, optimizers=1, lr=(0.1,), weight_decay=(0.0,), decoupled=False, grad_norm=1.0,
    norm_at_clip=None, weight_norm=7.0, ratio=0.01, input_rms=1.0, gradient_times_weight=7.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("events", "accumulation", "expected"),
    [((F, CARRIED, S), None, ["critical"]), ((Z, F, B, S), None, []), ((F, CARRIED, S, Z), 4, [])],
    ids=["never", "dropped", "declared"],
)
def test_missing_zero_grad(events: tuple[Any, ...], accumulation: int | None, expected: list[str]) -> None:
    facts = [(n, replace(CALLS, carried=(4.0,), accumulation=accumulation)) for n in (2, 3)]
    assert fires("optim.missing_zero_grad", *facts, made=steps(*events)) == expected


def test_zero_grad_before_step_needs_a_step_without_gradients() -> None:
    code = "optim.zero_grad_before_step"
    assert fires(code, made=steps(F, B, Z, S, grads=[0, 6], grad_norm=0.0)) == ["critical"]
    assert fires(code, made=steps(F, B, Z, F, B, S, grads=[6, 6])) == []
    assert fires(code, made=steps(*HEALTHY, grads=[6, 6])) == []


def test_step_never_called_needs_weights_that_stand_still() -> None:
    code, facts = "optim.step_never_called", CallsFacts(backwards=12)
    assert fires(code, (1, facts), made=[]) == ["critical"]
    assert fires(code, (1, replace(facts, moved=True)), made=[]) == []
    assert fires(code, (1, facts), made=[], finished=False) == []
    still, idle = WeightsFacts(steps=3, tensors=2, has_gradient=True), steps(Z, F, B, count=3, grads=[0, 6])
    assert fires(code, (3, facts), (3, still), made=idle) == ["critical"]
    assert fires(code, (3, facts), (3, still), made=idle, finished=False) == []
    assert fires(code, (3, facts), (3, replace(still, moved=1)), made=idle) == []
    assert fires(code, (3, CALLS), (3, still), made=steps(*HEALTHY, count=3, grads=[6, 6])) == []
    waits = replace(CALLS, optimizers=CALLS.optimizers * 2)
    assert fires(code, (20, waits), made=steps(*HEALTHY, count=20)) == ["warning"]


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("optim.params_in_two_optimizers", {"doubles": 3}),
        ("optim.params_missing", {"missing": ("head.weight",), "missing_share": 0.1}),
    ],
)
def test_what_the_listener_of_calls_counts(code: str, change: dict[str, Any]) -> None:
    made = steps(*HEALTHY)
    assert fires(code, (4, replace(CALLS, **change)), made=made) != []
    assert fires(code, (4, CALLS), made=made) == []


def test_look_alikes_of_what_is_counted() -> None:
    made = steps(*HEALTHY)
    tuned = replace(CALLS, missing=("body.weight",), missing_share=0.9, missing_were_trained=True)
    assert fires("optim.params_missing", (4, tuned), made=made) == ["info"]
    stale = replace(CALLS, missing=("a",), missing_share=0.9, optimizers=(OptimizerFacts(6, 6, (GROUP,)),))
    assert fires("optim.params_missing", (4, stale), made=made) == []
    assert fires("optim.stale_params", (4, stale), made=made) == ["critical"]
    assert fires("optim.stale_params", (4, tuned), made=made) == []


@pytest.mark.parametrize(("at", "found"), [(1.0, ["critical"]), (65536.0, [])], ids=["plain", "times the scale"])
def test_clips_of_scaled_gradients(at: float, found: list[str]) -> None:
    facts = ScalerFacts(steps=4, scaled_clip=ScaledClip(at, 70000.0, 65536.0), scaled_clips=3)
    assert fires("gradient.clip_before_unscale", (4, facts), made=steps(*HEALTHY)) == found


def test_a_group_at_zero() -> None:
    zero = replace(GROUP, lr=0.0)
    facts = replace(CALLS, optimizers=(OptimizerFacts(12, 0, (GROUP, zero)),))
    warming = replace(CALLS, optimizers=(OptimizerFacts(12, 0, (GROUP, replace(zero, initial_lr=0.1))),))
    code, made = "optim.group_lr_zero", steps(*HEALTHY)
    assert fires(code, (1, facts), (2, facts), made=made) == ["warning"]
    assert fires(code, (1, facts), made=made) == []
    assert fires(code, (1, warming), (2, warming), made=made) == []


def test_scaled_gradients() -> None:
    code, made = "precision.gradients_not_unscaled", steps(*HEALTHY)
    assert fires(code, (4, ScalerFacts(scaled_updates=4, since=1)), made=made) == ["critical"]
    assert fires(code, (4, ScalerFacts(steps=4, other=4)), made=made) == ["critical"]
    assert fires(code, (4, ScalerFacts(steps=4)), made=made) == []


@pytest.mark.parametrize(
    ("events", "norm", "expected"),
    [
        ((Z, F, B, S, clip()), 5.0, ["warning"]),
        ((Z, F, B, clip(parameters=0), S), 5.0, ["warning"]),
        ((Z, F, B, S, clip()), 0.5, []),
        ((Z, F, B, clip(), S), 1.0, []),
    ],
    ids=["after step", "no parameters", "below", "in time"],
)
def test_clip_no_effect(events: tuple[Any, ...], norm: float, expected: list[str]) -> None:
    assert fires("gradient.clip_no_effect", made=steps(*events, grad_norm=norm, grads=[6, 6])) == expected


def test_clip_always_active_needs_a_loss_that_stands() -> None:
    events, code = (Z, F, B, clip(at=1e-4), S), "gradient.clip_always_active"
    assert fires(code, made=steps(*events, count=20)) == ["warning"]
    falling = tuple(2.0 - 0.05 * n for n in range(20))
    assert fires(code, made=steps(*events, losses=falling)) == []
    assert fires(code, made=steps(Z, F, B, clip(), S, count=20)) == []


def test_lr_too_high_needs_a_smaller_rate_that_helps() -> None:
    worse, code = replace(UPDATE, after=9.0), "optim.lr_too_high"
    rising = tuple(2.0 + n for n in range(8))
    assert fires(code, (1, worse), (1, BatchStepsFacts(rising, 0.1)), made=steps(*HEALTHY)) != []
    assert fires(code, (1, worse), (1, BatchStepsFacts(rising, None)), made=steps(*HEALTHY)) == []
    assert fires(code, (1, UPDATE), (1, BatchStepsFacts(rising, 0.1)), made=steps(*HEALTHY)) == []
    one_batch = BatchStepsFacts((2.0, 9.0, 4.0, 0.0, 0.0), 0.1)  # is fitted by large updates, and the run is not
    huge, flat = replace(worse, ratio=8.0), steps(*HEALTHY, count=24)
    assert fires(code, (1, huge), (1, one_batch), made=flat) != []
    assert fires(code, (1, worse), (1, one_batch), made=flat) == []
    falling = steps(*HEALTHY, losses=tuple(2.0 - 0.05 * n for n in range(24)))
    assert fires(code, (1, huge), (1, one_batch), made=falling) == []
    large, noisy = replace(UPDATE, ratio=0.05), (2.0, 1.9, 2.1, 1.8, 1.9)
    stuck = BatchStepsFacts(noisy, 0.1, falls_to=0.5)  # learns much more from a batch at a tenth of the rate
    assert fires(code, (1, large), (1, stuck), made=flat) == ["warning"]
    assert fires(code, (1, large), (1, replace(stuck, falls_to=1.8)), made=flat) == []
    assert fires(code, (1, large), (1, stuck), made=falling) == []
    explodes = replace(UPDATE, after=40.0)  # the loss falls again, by less than half
    assert fires(code, (1, explodes), (1, one_batch), made=falling) == ["critical"]
    halved = steps(*HEALTHY, losses=tuple(2.0 - 0.08 * n for n in range(24)))
    assert fires(code, (1, explodes), (1, one_batch), made=halved) == []


def test_lr_too_low_needs_a_loss_that_stands_and_no_warm_up() -> None:
    tiny, code, made = replace(UPDATE, ratio=1e-8), "optim.lr_too_low", steps(*HEALTHY, count=12)
    warming = replace(CALLS, optimizers=(OptimizerFacts(6, 0, (replace(GROUP, initial_lr=1.0),)),))
    assert fires(code, (1, tiny), (8, tiny), made=made) == ["critical"]
    assert fires(code, (1, tiny), (8, UPDATE), made=made) == []
    assert fires(code, (1, tiny), (8, warming), made=made) == []
    assert fires(code, (1, tiny), made=steps(*HEALTHY, losses=tuple(2.0 - 0.1 * n for n in range(12)))) == []
    small, longer = replace(UPDATE, ratio=1e-5), steps(*HEALTHY, count=64)
    assert fires(code, (1, small), (64, small), made=longer) == ["warning"]
    assert fires(code, (1, small), (12, small), made=made) == []
    converged = (50.0, 3.0, 0.1, *[1e-5] * 20)  # as by L-BFGS, whose updates are 0 at the minimum
    assert fires(code, (20, tiny), made=steps(*HEALTHY, losses=converged)) == []


def test_weight_decay_too_high() -> None:
    code, made = "optim.weight_decay_too_high", steps(*HEALTHY, count=24)
    strong = replace(UPDATE, weight_decay=(10.0,), lr=(3e-3,), decoupled=True)
    assert fires(code, (24, strong), made=made) == ["warning"]
    assert fires(code, (24, replace(UPDATE, weight_decay=(1.0,))), made=made) == ["warning"]
    coupled = replace(UPDATE, weight_decay=(1.0,))
    assert fires(code, (1, coupled), (24, replace(coupled, weight_norm=1e-6)), made=made) == ["warning"], "they shrank"
    dead = replace(UPDATE, weight_decay=(5e-4,), grad_norm=1e-9)
    assert fires(code, (24, dead), made=made) == [], "a usual decay, and no gradient"
    assert fires(code, (24, replace(strong, weight_decay=(0.1,))), made=made) == []
    assert fires(code, (24, replace(strong, weight_decay=(0.01,), lr=(10.0,))), made=made) == [], "the rate is too high"
    falling = steps(*HEALTHY, losses=tuple(2.0 - 0.05 * n for n in range(24)))
    assert fires(code, (24, strong), made=falling) == []


def test_exploding_is_seen_at_the_first_updates_alone() -> None:
    huge, code, made = replace(UPDATE, gradient_times_weight=7e4), "gradient.exploding", steps(*HEALTHY)
    assert fires(code, (1, huge), made=made) == ["warning"]
    policy = replace(UPDATE, loss=1e-9, gradient_times_weight=7.0)  # a loss that is 0 on purpose
    assert fires(code, (1, policy), made=made) == []
    assert fires(code, (1, huge), made=steps(Z, F, B, clip(), S)) == ["info"]
    assert fires(code, (9, huge), made=made) == []
    assert fires(code, (1, UPDATE), made=made) == []


def test_moments_of_other_params() -> None:
    code, names = "optim.moments_of_other_params", ("a", "b", "c", "d")
    assert fires(code, (1, LoadedMomentsFacts("Adam", names, (3.0, 2.0, 1.0, 1.0), 0.2)), made=steps(*HEALTHY)) == [
        "warning"
    ]
    assert fires(code, (1, LoadedMomentsFacts("Adam", names, (3.0, 3.0, 3.0, 3.0), 3.0)), made=steps(*HEALTHY)) == []
    assert fires(code, (1, LoadedMomentsFacts("Adam", names, (0.3, 0.2, 0.2, 0.1), 0.1)), made=steps(*HEALTHY)) == []


WINDOW = AccumulationFacts(4, is_plain=True, weights=(0.25,) * 4, counts=(16.0,) * 4, norm_then=1.0, norm_now=1.0)


def test_accumulation_not_normalised() -> None:
    code, made = "gradient.accumulation_not_normalised", steps(*HEALTHY)
    assert fires(code, (1, replace(WINDOW, weights=(1.0,) * 4)), made=made) == ["warning"]
    assert fires(code, (1, replace(WINDOW, weights=(0.5,) * 4)), made=made) == ["warning"]
    assert fires(code, (1, replace(WINDOW, weights=(0.5,) * 4)), (2, WINDOW), made=made) == ["info"]
    assert fires(code, (1, WINDOW), made=made) == []
    assert fires(code, (1, replace(WINDOW, weights=(1.0,) * 4, norm_then=0.25)), made=made) == []


def test_accumulation_in_the_trainer_of_transformers_has_its_own_fix() -> None:
    check = check_of("gradient.accumulation_not_normalised")
    assert check is not None
    window = replace(WINDOW, weights=(1.0,) * 4, of_transformers=True)
    (finding,) = check.results(RunContext([*steps(*HEALTHY), exam(1, window)]))
    assert isinstance(finding, Finding)
    found = finding.found
    assert "model_accepts_loss_kwargs" in found.remedy and "num_items_in_batch" in found.cause


def test_accumulation_token_weighting() -> None:
    code, made = "gradient.accumulation_token_weighting", steps(*HEALTHY)
    assert fires(code, (1, replace(WINDOW, counts=(10.0, 100.0, 20.0, 90.0))), made=made) == ["warning"]
    assert fires(code, (1, replace(WINDOW, counts=(16.0, 16.0, 16.0, 5.0))), made=made) == []
    assert fires(code, (1, WINDOW), made=made) == []
    weighed = replace(WINDOW, counts=(10.0, 100.0, 20.0, 90.0), weights=(0.05, 0.45, 0.1, 0.4))
    assert fires(code, (1, weighed), made=made) == []


def test_accumulation_discarded_needs_a_batch_for_each_pass() -> None:
    code, events = "gradient.accumulation_discarded", (Z, F, B, Z, F, B, S)
    assert fires(code, made=steps(*events, ids=[8, 8])) == ["critical"]
    assert fires(code, made=steps(*events, ids=[8])) == []
    assert fires(code, made=steps(Z, F, B, F, B, S, ids=[8, 8])) == []
    assert fires(code, made=steps(*events, ids=[8, 8], used_by_hand=True)) == []


def test_windows_of_accumulation() -> None:
    code, two, one = "gradient.accumulation_window_wrong", steps(Z, F, B, F, B, S, count=6), steps(*HEALTHY, count=6)
    assert fires(code, (6, replace(CALLS, accumulation=4)), made=two) == ["warning"]
    assert fires(code, (6, CALLS), made=[one[0], *two[1:]]) == ["warning"]
    assert fires(code, (6, CALLS), made=[*two[:2], one[2], *two[3:5], one[5]]) == []
    assert fires(code, (6, replace(CALLS, accumulation=2)), made=two) == []
    assert fires(code, (6, CALLS), made=one) == []
    after_the_actor = steps(F, B, Z, F, B, S, count=6)
    assert fires(code, (6, CALLS), made=[one[0], *after_the_actor[1:]]) == []


def test_a_leftover_window_is_longer_than_the_others() -> None:
    code, two, three = (
        "gradient.accumulation_window_wrong",
        steps(Z, F, B, F, B, S, count=6),
        steps(F, B, F, B, F, B, S, count=6),
    )
    made = [*two[:3], three[3], *two[4:]]
    assert fires(code, (6, replace(CALLS, split_windows=((4, 1, 3),))), made=made) == ["warning"]
    assert fires(code, (6, replace(CALLS, split_windows=((4, 1, 2),))), made=two) == []
    assert fires(code, (6, CALLS), made=two) == []
