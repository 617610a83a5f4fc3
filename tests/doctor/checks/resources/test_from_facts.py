"""Checks of resources on measurements: what grows is told from what is filled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.doctor.checks.loops import made_of
from trainwright.doctor.check import Check
from trainwright.doctor.context import RunContext
from trainwright.doctor.diagnose import diagnose
from trainwright.doctor.discovery import check_of
from trainwright.doctor.facts.resources import GraphSize, GrowthFacts, HeldResources, MemoryFacts
from trainwright.monitoring.logbook import allocator_values
from trainwright.runs.records import NotCaptured, OutOfMemory, Watched

MIB, GIB = 2**20, 2**30


def of(name: str) -> Check:
    check = check_of(f"resources.{name}")
    assert check is not None
    return check


def readings(change: Callable[[int, HeldResources], HeldResources], number: int = 20) -> GrowthFacts:
    """What was held after every 16th step."""
    held = [HeldResources(step=16 * n, memory_bytes=500 * MIB) for n in range(1, number + 1)]
    return GrowthFacts(held=tuple(change(n, each) for n, each in enumerate(held)), most_hooks="1")


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        ("memory_grows", lambda n, held: replace(held, memory_bytes=(500 + 20 * n) * MIB), True),
        ("memory_grows", lambda n, held: replace(held, device_bytes=(100 + 20 * n) * MIB), True),
        ("memory_grows", lambda n, held: replace(held, memory_bytes=(500 + 50 * min(n, 8)) * MIB), False),
        ("memory_grows", lambda n, held: replace(held, memory_bytes=(500 + 40 * (n % 4)) * MIB), False),
        ("hooks_grow", lambda n, held: replace(held, hooks=16 * n), True),
        ("hooks_grow", lambda n, held: replace(held, hooks=16), False),
    ],
)
def test_growth(name: str, change: Callable[[int, HeldResources], HeldResources], found: bool) -> None:
    assert bool(made_of(of(name), (320, readings(change)))) == found


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        (MemoryFacts(old_losses=20, graphs_alive=20), True),
        (MemoryFacts(old_outputs=20, outputs_alive=20), True),
        (MemoryFacts(old_losses=20, graphs_alive=2, old_outputs=20), False),
        (MemoryFacts(old_losses=61, graphs_alive=10, old_outputs=61), False),  # a window
    ],
)
def test_graphs_that_are_kept(facts: MemoryFacts, found: bool) -> None:
    assert bool(made_of(of("graphs_kept"), (30, facts))) == found


@pytest.mark.parametrize(
    ("nodes", "goes_back", "found"),
    [([10, 15, 20, 25, 30], True, True), ([10, 15, 20, 25, 30], False, False), ([10, 30, 12, 40, 50], True, False)],
)
def test_a_graph_that_grows(nodes: list[int], goes_back: bool, found: bool) -> None:
    graphs = tuple(GraphSize(n + 1, count, False, goes_back) for n, count in enumerate(nodes))
    assert bool(made_of(of("graph_grows"), (5, MemoryFacts(graphs=graphs)))) == found


@pytest.mark.parametrize(
    ("objects", "grown", "found"), [(600_000, 10 * MIB, True), (600_000, MIB // 2, False), (100, 10 * MIB, False)]
)
def test_workers_that_copy(objects: int, grown: float, found: bool) -> None:
    facts = MemoryFacts(private_bytes=(2e7, 2e7 + grown), objects=objects)
    assert bool(made_of(of("workers_copy_dataset"), (16, facts))) == found


@pytest.mark.parametrize(
    ("wait_s", "step_s", "found"), [(0.02, 0.021, True), (0.001, 0.0011, False), (0.02, 0.1, False)]
)
def test_waits_for_data(wait_s: float, step_s: float, found: bool) -> None:
    values = {"step_s": step_s, "wait_s": wait_s}
    steps = [Watched(time_s=0.0, step=n, loss=1.0, grad_norm=1.0, lr=0.1, values=values) for n in range(1, 61)]
    assert bool(made_of(of("waits_for_data"), steps=steps)) == found


def test_graphs_that_are_not_used_are_named_with_the_reason() -> None:
    assert not diagnose(RunContext([]), [of("graphs_not_used")]).findings
    reports = [NotCaptured(time_s=0.0, step=step, reason=f"reason {step}") for step in (4, 9)]
    (found,) = (each.found for each in diagnose(RunContext(reports), [of("graphs_not_used")]).findings)
    assert (found.step, found.severity) == (9, "info") and found.symptom.endswith("reason 9")


@pytest.mark.parametrize(("next_micro", "severity"), [(None, "critical"), (4, "warning")])
def test_out_of_memory(next_micro: int | None, severity: str) -> None:
    ran_out = OutOfMemory(
        time_s=0.0,
        step=3,
        phase="backward",
        error="CUDA out of memory",
        asked_bytes=GIB,
        module="blocks.1",
        micro=8,
        next_micro=next_micro,
        in_use_bytes=70 * GIB,
        capacity_bytes=80 * GIB,
        reserved_bytes=71 * GIB,
        given_back_bytes=50 * GIB,
        held={"weights": 10 * GIB, "optimizer": 10 * GIB},
    )
    (found,) = (each.found for each in diagnose(RunContext([ran_out]), [of("out_of_memory")]).findings)
    assert (found.severity, found.where.module) == (severity, "blocks.1")
    assert found.remedy.startswith("model.activation_checkpointing")


def test_what_torch_counts_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {
        "num_alloc_retries": 7,
        "allocated_bytes": {"all": {"current": 3 * GIB}},
        "reserved_bytes": {"all": {"current": 4 * GIB}},
    }
    monkeypatch.setattr("torch.cuda.memory.memory_stats_as_nested_dict", lambda device=None: stats)
    monkeypatch.setattr("torch.cuda.memory_stats_as_nested_dict", lambda device=None: stats)
    values = allocator_values(torch.device("cuda", 1))
    assert values == {"cuda1/allocator_retries": 7.0, "cuda1/allocated_bytes": 3 * GIB, "cuda1/reserved_bytes": 4 * GIB}
    assert allocator_values(torch.device("cpu")) == {}
