"""Time by the roofline, and traces of two sizes carried to others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.traces import GIB, moment, scaled, trace
from trainwright.plan.call_trace import Trace, Work
from trainwright.plan.devices import Device
from trainwright.plan.roofline import StepTime, rate, scaled_time
from trainwright.plan.scale import Scaled, accumulate, hull, tidy

PLAIN = Device("plain", "cuda", 80 * GIB, 1e12, {"fp32": 1e13, "tf32": 5e13, "bf16": 1e14}, reach_flops=1.0)
DEVICE = replace(PLAIN, reach_bandwidth=1.0, launch_s=0.0)


def step_time(traced: Trace, device: Device) -> StepTime:
    """The time of a step whose work does not depend on the samples."""
    return scaled_time(Scaled(traced, traced, (2, 4)), 2, 1, device, "bf16")


@pytest.mark.parametrize(
    ("work", "seconds", "on"),
    [
        (Work("forward", "", "mm", "bfloat16", 1, 10**14, 10**9), 1.0, "arithmetic"),
        (Work("forward", "", "mm", "float32", 1, 10**13, 10**9), 1.0, "arithmetic"),
        (Work("forward", "", "add", "float32", 1, 0, 2 * 10**12), 2.0, "memory"),
        (Work("forward", "", "add", "float32", 1000, 0, 8), 0.5, "launches"),
    ],
)
def test_an_operator_waits_for_what_is_slowest(work: Work, seconds: float, on: str) -> None:
    device = replace(DEVICE, launch_s=5e-4 if on == "launches" else 0.0)
    time = step_time(Trace("cuda", (moment("forward"),), {}, (work,)), device)
    assert time.step_s == pytest.approx(seconds)
    assert max(time.spent, key=lambda name: time.spent[name]) == on


def test_tf32_is_what_float32_products_run_in_when_asked() -> None:
    assert rate(DEVICE, "float32", "tf32") == 5e13
    assert rate(DEVICE, "float32", "bf16") == 1e13
    assert rate(DEVICE, "float16", "fp16") == 1e13  # not in hardware


def test_mfu_counts_what_the_model_needs_only() -> None:
    plain, again = trace(2, flops=10**13), trace(2, again=True, flops=10**13)
    one, two = step_time(plain, DEVICE), step_time(again, DEVICE)
    assert two.flops == pytest.approx(4 / 3 * one.flops)
    assert two.checkpointing_flops == one.flops / 3
    assert two.mfu < one.mfu < 1.0
    assert one.mfu == pytest.approx(one.flops / one.step_s / 1e14)


@pytest.mark.parametrize("micro", [1, 2, 4, 7])
@pytest.mark.parametrize("accumulation", [1, 2, 5])
def test_two_sizes_give_all(micro: int, accumulation: int) -> None:
    made, whole = scaled().at(micro, accumulation), accumulate(trace(micro), accumulation)
    for one, other in zip(made.moments, whole.moments, strict=True):
        assert one.total == pytest.approx(other.total)
        assert one.held["gradients"] == other.held.get("gradients", 0)
    assert made.peak.total == scaled().peak_bytes(micro, accumulation)
    assert made.flops == whole.flops
    by_rows = step_time(made, DEVICE).step_s
    assert scaled_time(scaled(), micro, accumulation, DEVICE, "bf16").step_s == pytest.approx(by_rows)


def test_sums_of_gradients_stay_from_the_second_micro_batch_on() -> None:
    once, more = trace(2), accumulate(trace(2), 3)
    assert len(more.moments) == 2 * 3 + 1
    forward = more.moments[3]
    assert forward.held["gradients"] == 4 * GIB
    assert forward.held["inputs"] == 3 * once.moments[0].held["inputs"]
    assert more.moments[4].held["temporaries"] == 2 * GIB  # the new gradient, before it is added
    assert more.moments[-1].phase == "update"
    assert more.flops == 3 * once.flops


def test_traces_that_differ_are_compared_by_module() -> None:
    large = trace(4)
    double = replace(large, moments=(large.moments[0], *large.moments))
    made = Scaled(trace(2), double, (2, 4))
    assert made.peak_bytes(8, 1) == scaled().peak_bytes(8, 1)


def test_only_lines_that_are_highest_somewhere_are_kept() -> None:
    assert hull([(0, 3), (5, 1), (3, 2), (1, 1), (9, 0)]) == [(9, 0), (0, 3)]
    assert hull([(0, 3), (6, 1), (4, 2), (7, 0)]) == [(7, 0), (6, 1), (4, 2), (0, 3)]


def test_what_comes_behind_the_last_backward_pass_is_update() -> None:
    made = replace(trace(2), moments=(*trace(2).moments[:3], moment("forward", weights=1), moment("update")))
    assert [each.phase for each in tidy(made).moments] == ["forward", "backward", "backward", "update", "update"]
