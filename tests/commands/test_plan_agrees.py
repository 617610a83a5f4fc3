"""``plan`` and ``train`` give the same figures for one recipe on one machine, from one source."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from trainwright.commands.plan import show_plan
from trainwright.plan.explain import preflight
from trainwright.recipe import Loaded, from_mapping
from trainwright.training.prepare import prepare
from trainwright.training.run import process_settings

PARTS = "tests.commands.check.parts"


def recipe(tmp_path: Path, **changes: Any) -> Loaded:
    return from_mapping(
        {
            "until": "4steps",
            "device": "cpu",
            "precision": "fp32",
            "folder": str(tmp_path),
            "model": {"use": f"{PARTS}:net", "args": {"norm": True}},
            "data": {"train": {"use": f"{PARTS}:blobs"}},
            "batch": {"size": 32, "micro": 8},
            **changes,
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"use": f"{PARTS}:net", "args": {"norm": True}, "ema": 0.9, "freeze": ["0.*"]}},
        {"optimizer": {"use": "sgd", "lr": 0.1}, "batch": {"size": 32}},
    ],
    ids=["plain", "average and frozen weights", "sgd, one micro-batch"],
)
def test_the_memory_is_the_same(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The forecast counts it under fake tensors, ``train`` by arithmetic and its dry run."""
    loaded = recipe(tmp_path, **changes)
    shown = show_plan(loaded, recipe="r.yaml", device="cpu")
    with process_settings():
        found = prepare(loaded).plan.predicted.memory_bytes
    assert found is not None
    held = {kind: size for kind, size in shown.forecast.trace.held.items() if size}
    assert held.keys() == {kind for kind, size in found.items() if size}
    for kind, size in held.items():
        assert found[kind] == pytest.approx(size, rel=0.05, abs=64), kind


@pytest.mark.slow
def test_the_time_is_measured_here_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    loaded = recipe(tmp_path)
    shown = show_plan(loaded, recipe="r.yaml")
    assert shown.measured is not None
    [line] = [line for line in shown.lines() if line.startswith("  measured")]
    [time] = [line for line in preflight(shown.measured, 0.0) if line.startswith("time ")]
    assert re.split(" of it|:", time.removeprefix("time").strip())[0] in line and "other programs come on top" in line
    answer = shown.to_json()["measured"]
    assert isinstance(answer, dict) and answer["step_s"] == shown.measured.predicted.step_s


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"device": "rtx4090"}, {"memory": "64KiB"}], ids=["device", "memory"])
def test_for_another_device_nothing_is_measured(tmp_path: Path, options: dict[str, str]) -> None:
    shown = show_plan(recipe(tmp_path), recipe="r.yaml", **options)  # type: ignore[arg-type]
    assert shown.measured is None and shown.to_json()["measured"] is None
    assert any(line.startswith("  without") for line in shown.lines())


@pytest.mark.slow
def test_a_dry_run_that_fails_is_said(tmp_path: Path) -> None:
    loaded = recipe(tmp_path, loss=f"{PARTS}:eight_fail")
    shown = show_plan(loaded, recipe="r.yaml")
    assert shown.measured is None
    [line] = [line for line in shown.lines() if line.startswith("  without")]
    assert "not measured" in line and "8 samples" in line
