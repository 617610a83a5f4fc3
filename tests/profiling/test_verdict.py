"""The verdict on a profile is a pure function, so devices that are not installed are covered, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from trainwright.plan.call_trace import Work
from trainwright.plan.devices import Device, known_devices
from trainwright.profiling.verdict import Bound, HostSync, Hot, ProfileFacts, judge
from trainwright.profiling.words import Profile

H100 = known_devices()["h100-80gb"]
CPU = Device("cpu", "cpu", 1 << 34, 2e10, {"fp32": 1e11}, reach_flops=1.0, reach_bandwidth=1.0, launch_s=1e-6)
MATMULS = Work("forward", "", "mm", "float32", 10, 10**10, 10**6)
COPIES = Work("forward", "", "mul", "float32", 10, 0, 10**9)
TINY = Work("forward", "", "add", "float32", 10_000, 0, 10**6)
COMPUTING = {"forward": 0.04, "backward": 0.05, "update": 0.01}


def facts(phases: Mapping[str, float] = COMPUTING, *work: Work, **known: object) -> ProfileFacts:
    return ProfileFacts("a device", "fp32", 20, sum(phases.values()), phases, work=work or (MATMULS,), **known)  # type: ignore[arg-type]


def advised(measured: ProfileFacts, device: Device = CPU) -> list[str]:
    return [each.name for each in judge(measured, device).advice]


@pytest.mark.parametrize(
    ("phases", "bound", "named"),
    [
        ({"data": 0.2}, "input", "waits for data"),
        ({"exchange": 0.2}, "communication", "other ranks"),
        ({"saving": 0.2}, "overhead", "saves checkpoints"),
        ({"looking": 0.2}, "overhead", "runs observers"),
        ({"loop": 0.2}, "own code", "beside the model"),
        ({"data": 0.002, "saving": 0.002}, "compute", "forward and backward"),
    ],
)
def test_what_takes_most_is_named(phases: dict[str, float], bound: Bound, named: str) -> None:
    verdict = judge(facts({**COMPUTING, **phases}), CPU)
    assert verdict.bound == bound
    assert named in verdict.headline


@pytest.mark.parametrize(("work", "bound"), [(MATMULS, "compute"), (COPIES, "memory-bandwidth"), (TINY, "launch")])
def test_compute_is_told_apart_by_the_roofline(work: Work, bound: Bound) -> None:
    assert judge(facts(COMPUTING, work), CPU).bound == bound
    assert judge(facts(COMPUTING, work), H100).bound == bound


def test_a_gpu_that_is_idle_waits_for_launches() -> None:
    assert judge(facts(busy=0.2), H100).bound == "launch"
    assert judge(facts(busy=0.9), H100).bound == "compute"


def test_the_workers_are_named() -> None:
    slow = facts({**COMPUTING, "data": 0.3}, workers=1)
    assert "1 worker reads" in judge(slow, CPU).headline
    assert advised(slow)[:3] == ["2 workers", "4 workers", "0 workers"]
    assert "0 workers" not in advised(replace(slow, workers=0))
    assert "the training process reads itself" in judge(replace(slow, workers=0), CPU).headline
    assert "num_workers" in advised(replace(slow, workers=None))[0]


def test_the_line_that_takes_the_time_is_named() -> None:
    slow = facts({**COMPUTING, "looking": 0.3}, hot=(Hot("looking", "Slow", "own.py:7", 0.3),))
    verdict = judge(slow, CPU)
    assert "(Slow)" in verdict.headline
    assert any("own.py:7" in each for each in verdict.evidence)
    assert advised(slow) == ["run Slow less often"]


def test_saving_in_each_step_is_told_how_often_it_could() -> None:
    assert "save every 50 times" in advised(facts({**COMPUTING, "saving": 0.1}))[0]


def test_a_host_sync_is_named_with_its_line() -> None:
    synced = facts(syncs=(HostSync("_local_scalar_dense", "model.py:12", "forward", 1),), busy=0.3)
    assert any("model.py:12" in each and "waits for the GPU" in each for each in judge(synced, H100).evidence)
    assert "leave out the host sync at model.py:12" in advised(synced, H100)[0]


def test_fp32_where_bf16_would_do() -> None:
    assert advised(facts(), H100) == ["bf16", "tf32"]
    assert advised(facts(), CPU) == [], "it computes no bf16"
    assert "bf16" not in advised(facts(COMPUTING, replace(MATMULS, dtype="bfloat16")), H100)
    slow = replace(CPU, flops={"fp32": 1e11, "bf16": 5e10})  # some CPUs multiply bf16 half as fast, and move it twice
    assert advised(facts(), slow) == []
    waits = facts(COMPUTING, MATMULS, replace(COPIES, bytes=10**10))
    assert advised(waits, slow) == ["bf16", "compile the model"]
    assert "half as many bytes" in judge(waits, slow).advice[0].why


def test_a_lean_loop_has_nothing_to_gain() -> None:
    lean = facts(fused=True, workers=0)
    assert Profile(lean, judge(lean, CPU)).next == "nothing to gain"


def test_the_share_of_the_peak_rate() -> None:
    assert judge(facts(), CPU).mfu == pytest.approx(10**10 / (0.1 * 1e11))
