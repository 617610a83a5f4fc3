"""The words of a plan: folded blocks, labelled micro-batches, rows that look alike, sizes that can be read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainwright.plan.call_trace import Moment, Phase, Trace
from trainwright.plan.devices import Device
from trainwright.plan.scale import accumulate
from trainwright.report.forecast import by_block, human_flops, memory_lines, timeline_text, usable_line

GIB = 1 << 30
H100 = Device("h100", "cuda", 80 * GIB, 3e12, {"fp32": 67e12})


def moment(phase: Phase, activations: float, module: str = "blocks.0", gradients: float = 0.0) -> Moment:
    held = {"weights": 4 * GIB, "activations": round(activations * GIB), "gradients": round(gradients * GIB)}
    return Moment(phase, 0, module, "mm", held)  # type: ignore[arg-type]


def trace() -> Trace:
    forward = [moment("forward", 0.4 * i) for i in range(11)]
    backward = [moment("backward", 4 - 0.4 * i, gradients=0.4 * i) for i in range(11)]
    moments = (*forward, moment("forward", 5.0, module=""), *backward, moment("update", 0.0, "", 4.0))
    kept = {**{f"blocks.{i}.mlp": 3 * GIB for i in range(12)}, "": GIB, "norm": GIB // 2}
    return Trace("cuda", moments, kept, ())


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 FLOP"), (5.03e14, "503 TFLOP"), (7.12e15, "7.12 PFLOP"), (9.42e4, "94.2 kFLOP"), (3e18, "3 EFLOP")],
)
def test_flops_can_be_read(count: float, said: str) -> None:
    assert human_flops(count) == said


def test_equal_blocks_are_one() -> None:
    kept = {**trace().kept, "other.0.a": GIB, "other.2.a": GIB, "other.1.a": 1}
    assert by_block(kept)[0] == ("blocks.0-11 x 12", 36 * GIB)
    assert ("2 of other.0-2", 2 * GIB) in by_block(kept)
    assert sum(size for _, size in by_block(kept)) == sum(kept.values())


def test_a_peak_outside_of_the_modules_is_placed() -> None:
    assert memory_lines(trace())[0] == "at the peak 9 GiB (forward, mm in the loss or the model's own code)"


def test_micro_batches_are_labelled_and_the_layout_is_named() -> None:
    lines = timeline_text(accumulate(trace(), 40), 80 * GIB, "the nearest fit, not as written: 2 x 40")
    assert lines[0] == "one step    the nearest fit, not as written: 2 x 40"
    assert [line.strip() for line in lines if line.endswith(":")] == [
        "first micro-batch:",
        "each of the other 39 micro-batches:",
    ]
    assert sum("<- peak" in line for line in lines) == 1
    alone = timeline_text(trace(), 80 * GIB, "as written")
    assert not any("micro-batch" in line for line in alone)
    assert any("second micro-batch" in line for line in timeline_text(accumulate(trace(), 2), 80 * GIB, ""))


def test_rows_that_look_alike_are_one() -> None:
    flat = replace(trace(), moments=tuple(moment("backward", 2.0 + 1e-3 * (i % 3)) for i in range(200)))
    lines = timeline_text(flat, 80 * GIB, "")
    assert len(lines) == 3
    assert "(24 alike)" in lines[2]
    assert "<- peak" in lines[2]


def test_what_is_not_usable_is_explained() -> None:
    assert (
        usable_line(H100)
        == "h100, 80 GiB: 75.4 GiB usable (5% for fragmentation and 600 MiB for CUDA's context left out)"
    )
    assert "CUDA" not in usable_line(replace(H100, kind="cpu"))
