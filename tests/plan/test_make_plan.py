"""The batch equation, durations in engine units, and the decisions of a plan with their reasons."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.plan.changed import with_predicted
from trainwright.errors import RecipeError
from trainwright.plan.amounts import human_bytes, human_seconds
from trainwright.plan.batch import BatchPlan, scale_lr, solve_batch
from trainwright.plan.duration import Extent, Interval, Pace, extent, interval, span
from trainwright.plan.explain import memory_in_words, preflight
from trainwright.plan.make import (
    ResumedValues,
    RunFacts,
    Spent,
    candidates,
    choose_mode,
    choose_precision,
    choose_threads,
    make_plan,
    with_dry_run,
)
from trainwright.plan.memory import memory_bytes
from trainwright.recipe import Duration, Recipe, from_mapping

FACTS = RunFacts(
    train_samples=1000,
    tokens_per_sample=64,
    parameters=5000,
    trainable=5000,
    device="cpu",
    device_name="a CPU",
    low_precision=("bf16",),
    threads=(2, 1),
    classes=10,
)


def recipe(**keys: Any) -> Recipe:
    return from_mapping({"model": "gpt", "data": {"train": "digits"}, **keys}).recipe


@pytest.mark.parametrize(
    ("size", "micro", "accumulation", "ranks", "expected"),
    [
        (None, None, None, 1, BatchPlan(32, 32, 1)),
        (32, None, None, 1, BatchPlan(32, 32, 1)),
        (32, 8, None, 1, BatchPlan(32, 8, 4)),
        (32, None, 4, 1, BatchPlan(32, 8, 4)),
        (None, 8, 4, 1, BatchPlan(32, 8, 4)),
        (None, 8, None, 1, BatchPlan(8, 8, 1)),
        (32, 8, 4, 1, BatchPlan(32, 8, 4)),
        (32, 12, None, 1, BatchPlan(32, 12, 3)),  # 12 + 12 + 8
        (64, 8, None, 4, BatchPlan(64, 8, 2, 4)),
        (None, 8, 4, 2, BatchPlan(64, 8, 4, 2)),
    ],
)
def test_batch_equation(
    size: int | None, micro: int | None, accumulation: int | None, ranks: int, expected: BatchPlan
) -> None:
    assert solve_batch(size, micro, accumulation, ranks=ranks) == expected


def test_a_batch_that_contradicts_itself() -> None:
    with pytest.raises(RecipeError, match="leave accumulation out"):
        solve_batch(32, 8, 2)


PACE = Pace(batch_size=10, steps_per_epoch=100, tokens_per_sample=64)


@pytest.mark.parametrize(
    ("text", "steps"),
    [("7steps", 7), ("2ep", 200), ("0.5ep", 50), ("95samples", 10), ("640tok", 1), ("0.064Mtok", 100)],
)
def test_durations_in_steps(text: str, steps: int) -> None:
    until = Duration.parse(text)
    assert extent(until, PACE) == Extent(steps=steps)
    assert span(until, Extent(steps=1000), PACE, "x") == steps
    assert interval(until, Extent(steps=1000), PACE, "x") == Interval(steps=steps)


def test_durations_in_time_and_shares() -> None:
    minute = extent(Duration.parse("1min"), PACE)
    assert minute == Extent(seconds=60.0)
    assert span(Duration.parse("6s"), minute, PACE, "x") == pytest.approx(0.1)
    assert span(Duration.parse("0.1run"), minute, PACE, "x") == 0.1
    assert span(Duration.parse("0.1run"), Extent(steps=50), PACE, "x") == 5
    assert interval(Duration.parse("0.1run"), minute, PACE, "x") == Interval(fraction=0.1)
    assert interval(Duration.parse("0.1run"), Extent(steps=50), PACE, "x") == Interval(steps=5)
    assert interval(Duration.parse("5s"), Extent(steps=50), PACE, "x") == Interval(seconds=5.0)


@pytest.mark.parametrize(
    ("text", "pace", "message"),
    [
        ("2ep", replace(PACE, steps_per_epoch=None), "a stream"),
        ("2Mtok", replace(PACE, tokens_per_sample=0), "token ids"),
        ("5s", PACE, "budgeted in seconds"),
    ],
)
def test_durations_that_cannot_be_met(text: str, pace: Pace, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        span(Duration.parse(text), Extent(steps=10), pace, "schedule.warmup")


def test_lr_rules() -> None:
    assert scale_lr(0.1, rule="linear", batch=1024, base_batch=256) == pytest.approx(0.4)
    assert scale_lr(0.1, rule="sqrt", batch=1024, base_batch=256) == pytest.approx(0.2)
    changed = recipe(batch={"size": 512}, optimizer={"lr": 0.1, "lr_rule": {"rule": "linear", "base_batch": 256}})
    plan = make_plan(changed, FACTS)
    assert plan.lr == pytest.approx(0.2)
    note = next(note for note in plan.notes if note.topic == "learning rate")
    assert "256" in note.why and "linear" in note.why


def test_an_epoch_ends_in_a_short_step_unless_told() -> None:
    assert make_plan(recipe(batch={"size": 300}), FACTS).steps_per_epoch == 4
    dropped = recipe(batch={"size": 300}, data={"train": "digits", "drop_last": True})
    assert make_plan(dropped, FACTS).steps_per_epoch == 3
    assert make_plan(recipe(until="2ep", batch={"size": 300}), FACTS).extent.steps == 8


@pytest.mark.parametrize(
    ("until", "drop_last", "steps"),
    [
        ("4ep", False, 20 + 18 + 2 * 32),  # 1000 samples are 32 steps of 32; of the second epoch 560 are left
        ("4ep", True, 20 + 17 + 2 * 31),
        ("2.5ep", False, 20 + 18 + 16),
        ("4000samples", False, 20 + 80),  # 2560 are left
        ("0.256Mtok", False, 20 + 80),  # 163840 are left, 2048 a step
        ("90steps", False, 90),
        ("1ep", False, 20),
    ],
)
def test_what_is_left_is_counted_in_the_new_batch(until: str, drop_last: bool, steps: int) -> None:
    """After 20 steps of 72 samples, the last of the first epoch a short one."""
    spent = Spent(step=20, samples=1440, tokens=92160, epoch=1, position=440)
    changed = recipe(until=until, batch={"size": 32}, data={"train": "digits", "drop_last": drop_last})
    plan = make_plan(changed, FACTS, kept=ResumedValues(spent=spent))
    assert (plan.extent.steps, plan.spent) == (steps, spent)
    assert next(note.choice for note in plan.notes if note.topic == "steps left") == str(steps - 20)
    assert f"length      {steps} steps" in preflight(plan, 0.0)


def test_what_was_planned_is_kept() -> None:
    changed = recipe(until="1000steps", schedule={"warmup": "0.1run"}, checkpoint={"keep_every": "0.1run"})
    assert (make_plan(changed, FACTS).warmup, make_plan(changed, FACTS).cadence.keep_every) == (100, 100)
    kept = make_plan(changed, FACTS, kept=ResumedValues(warmup=7, keep_every=30))
    assert (kept.warmup, kept.cadence.keep_every) == (7, 30)


@pytest.mark.parametrize(
    ("until", "warmup", "message"),
    [
        ("60steps", 80, "the warm-up of 80 steps is not shorter than the run of 60 steps (until: 60steps)"),
        ("6s", 2.0, "the warm-up of 12 s is not shorter than the run of 6 s (until: 6s)"),
    ],
)
def test_a_run_shorter_than_the_warm_up_that_it_keeps(until: str, warmup: int | float, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make_plan(recipe(until=until), FACTS, kept=ResumedValues(warmup=warmup))
    assert message in str(caught.value)


def test_empty_and_too_small_datasets() -> None:
    with pytest.raises(RecipeError, match="empty"):
        make_plan(recipe(), replace(FACTS, train_samples=0))
    small = recipe(batch={"size": 64}, data={"train": "digits", "drop_last": True})
    with pytest.raises(RecipeError, match="no step"):
        make_plan(small, replace(FACTS, train_samples=20))


@pytest.mark.parametrize(
    ("setting", "device", "has", "seconds", "chosen"),
    [
        ("auto", "cpu", ("bf16",), {"fp32": 1.0, "bf16": 0.5}, "bf16"),
        ("auto", "cpu", ("bf16",), {"fp32": 1.0, "bf16": 1.0}, "fp32"),
        ("auto", "cpu", ("bf16",), {"fp32": 21.6, "bf16": 20.8}, "bf16"),
        ("auto", "cpu", ("bf16",), {"fp32": 21.6, "bf16": 21.2}, "fp32"),
        ("auto", "cpu", (), {"fp32": 1.0}, "fp32"),
        ("auto", "cuda", ("tf32", "bf16", "fp16"), {}, "bf16"),
        ("auto", "cuda", ("fp16",), {}, "fp16"),
        ("fp16", "cpu", (), {}, "fp16"),
        ("tf32", "cpu", (), {}, "fp32"),
        ("tf32", "cuda", ("tf32",), {}, "tf32"),
    ],
)
def test_precision(setting: str, device: str, has: tuple[str, ...], seconds: Any, chosen: str) -> None:
    precision, note = choose_precision(setting, device, has, seconds)
    assert precision == chosen == note.choice
    assert note.why
    if setting != "auto":
        assert precision in candidates(setting, device, has)


def test_the_preflight_says_what_a_person_needs() -> None:
    plan = with_dry_run(
        make_plan(recipe(until="100steps"), FACTS),
        precision="auto",
        facts=FACTS,
        loss=2.31,
        outputs=10,
        seconds={("fp32", 2): 0.02, ("fp32", 1): 0.03, ("bf16", 2): 0.01},
        thread_s={("fp32", 1): 0.03, ("bf16", 1): 0.015},
        memory_bytes=memory_bytes("adamw", {}, parameters=5000, trainable=5000, activations=1 << 20),
    )
    assert plan.predicted.expected_loss == math.log(10)
    message = "\n".join(preflight(plan, 0.0))
    for fragment in (
        "5,000",
        "100 steps",
        "bf16: measured",
        "20 ms with 2 and 30 ms with 1",
        "10 ms a step",
        "ln 10 = 2.3026",
        "1 MiB",
    ):
        assert fragment in message, message
    assert "far above" in "\n".join(preflight(with_predicted(plan, initial_loss=9.0), 0.0))
    assert "NOT FINITE" in "\n".join(preflight(with_predicted(plan, initial_loss=math.nan), 0.0))


def test_threads_that_wait_for_each_other_are_not_used() -> None:
    assert choose_threads((2, 1), {("fp32", 2): 0.010, ("fp32", 1): 0.011})[0] == 2
    assert choose_threads((2, 1), {("fp32", 2): 0.017, ("fp32", 1): 0.010, ("bf16", 2): 0.02})[0] == 2
    assert choose_threads((2, 1), {("fp32", 2): 0.500, ("fp32", 1): 0.011})[0] == 1
    assert choose_threads((4,), {}) == (4, ())


@pytest.mark.parametrize(("bf16_s", "precision"), [(0.05, "bf16"), (0.074, "fp32")])
def test_a_busy_machine_chooses_no_other_precision(bf16_s: float, precision: str) -> None:
    """There two threads wait for each other, and everything takes longer but by the processor time of one thread."""
    facts = replace(FACTS, device="cpu", low_precision=("bf16",), threads=(2, 1))
    planned = {"precision": "auto", "facts": facts, "loss": 1.0, "outputs": None, "memory_bytes": {}}
    planned["thread_s"] = {("fp32", 2): 0.04, ("fp32", 1): 0.075, ("bf16", 1): bf16_s}
    for fp32, slower in (((0.04, 0.075), 1.0), ((0.3, 0.1), 4.0)):
        seconds = {("fp32", 2): fp32[0], ("fp32", 1): fp32[1], ("bf16", 1): slower * bf16_s}
        mode = choose_mode("auto", facts, seconds, planned["thread_s"])  # type: ignore[arg-type]
        seconds.setdefault(mode, 0.123)
        plan = with_dry_run(make_plan(recipe(until="100steps"), facts), seconds=seconds, **planned)  # type: ignore[arg-type]
        assert (plan.precision, plan.threads) == mode and mode[0] == precision
        assert plan.predicted.step_s == seconds[mode]


def test_memory_by_optimizer() -> None:
    adamw = memory_bytes("adamw", {}, parameters=100, trainable=60, activations=7)
    assert adamw == {"weights": 400, "gradients": 240, "optimizer": 480, "activations": 7}
    assert memory_bytes("sgd", {}, parameters=100, trainable=60, activations=7)["optimizer"] == 0
    with_momentum = memory_bytes("sgd", {"momentum": 0.9}, parameters=100, trainable=60, activations=7)
    assert with_momentum["optimizer"] == 240


def test_memory_counts_average_buffers_and_batch() -> None:
    more = memory_bytes("adamw", {}, parameters=100, trainable=60, activations=7, average=240, buffers=3, inputs=5)
    assert more == {"weights": 640, "gradients": 240, "optimizer": 480, "activations": 7, "buffers": 3, "inputs": 5}
    assert memory_in_words(more) == "about 1.34 KiB: " + ", ".join(
        ["weights 640 B", "buffers 3 B", "gradients 240 B", "optimizer 480 B", "activations 7 B", "inputs 5 B"]
    )


def test_units_for_people() -> None:
    assert [human_bytes(n) for n in (5, 2048, 3 << 20, 3 << 30, 5 << 40)] == ["5 B", "2 KiB", "3 MiB", "3 GiB", "5 TiB"]
    assert [human_seconds(s) for s in (0.0123, 5, 250, 7500)] == ["12.3 ms", "5 s", "4 min 10 s", "2 h 5 min"]
