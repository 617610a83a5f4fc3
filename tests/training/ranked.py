"""Runs of several ranks that tests compare, kill and stop."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.forked import COMMAND_LINE, Forked

MODULE = """
import time, torch

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        time.sleep(0.005)  # so that a signal comes before the end
        return torch.randn(8) + index % 3, index % 3
"""
RECIPE = """
until: 30steps
model: {use: mlp, args: {sizes: [8, 16, 3], dropout: 0.3}}
data: {train: "slow:Slow"}
batch: {size: 8}
precision: fp32
checkpoint: {every: 5steps, at_least_every: null}
log: {every: 1steps, doctor: false}
"""


def make_project(folder: Path) -> Path:
    (folder / "slow.py").write_text(MODULE)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def train(project: Path, folder: str, attempt: int = 0, *more: str, count: int = 2) -> list[Forked]:
    words = ["train", str(project / "recipe.yaml"), "--set", f"folder={project / folder}", *more]
    return ranks.start(COMMAND_LINE, count, *words, cwd=project, attempt=attempt)


def wait_for_steps(log: Path, count: int, started: list[Forked]) -> None:
    end_s = time.monotonic() + 60
    while not log.exists() or log.read_bytes().count(b'"kind":"step"') < count:
        assert time.monotonic() < end_s and all(each.poll() is None for each in started), started[0].stderr
        time.sleep(0.01)


def killed_and_stopped(project: Path, steps: int, *settings: str) -> Path:
    """A run that goes on after SIGKILL of a rank at about ``steps`` steps, and after SIGTERM at twice as many."""
    log = project / "killed/run/log.jsonl"
    started = train(project, "killed", 0, *settings)
    wait_for_steps(log, steps, started)
    os.kill(started[1].pid, signal.SIGKILL)
    assert started[0].wait() == 1 and "another rank has ended" in started[0].stderr
    stopped = train(project, "killed", 1, *settings)
    wait_for_steps(log, 2 * steps, stopped)
    stopped[1].send_signal(signal.SIGTERM)
    assert [each.wait() for each in stopped] == [75, 75]
    ended = json.loads(log.read_text().splitlines()[-1])
    newest = sorted(path.name for path in (project / "killed/run/checkpoints").glob("step-*"))[-1]
    assert (ended["ending"], ended["reason"]) == ("stopped", "SIGTERM") and newest == f"step-{ended['step']:08d}"
    assert [each.wait() for each in train(project, "killed", 2, *settings)] == [0, 0]
    return project / "killed/run"


def last_weights(run: Path) -> bytes:
    weights = ranks.tensors_in(run / "checkpoints/step-00000030")
    return b"".join(weights[name].numpy().tobytes() for name in sorted(weights))


def numbers_of(record: dict[str, Any]) -> dict[str, float]:
    """Loss, norm, weight and metrics; a step in which nothing counts has a loss that is not a number."""
    own = {name: record[name] for name in ("loss", "grad_norm", "weight") if name in record}
    return {
        name: float(value) for name, value in {**own, **record.get("probed", {}), **record.get("metrics", {})}.items()
    }


def compare(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Losses are within 1e-6: eight roundings of a number of 1 to 2 in fp32; what is larger, within 2e-6 of itself."""
    assert [record["kind"] for record in found] == [record["kind"] for record in wanted]
    for one, other in zip(found, wanted, strict=True):
        same = ("kind", "step", "lr", "samples", "tokens", "ids_hash", "skipped")
        assert {name: one.get(name) for name in same} == {name: other.get(name) for name in same}
        mine, theirs = numbers_of(one), numbers_of(other)
        assert mine == pytest.approx(theirs, rel=2e-6, abs=1e-6, nan_ok=True), (one["step"], mine, theirs)
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=0, abs=1e-6, nan_ok=True), (one["step"], mine, theirs)
