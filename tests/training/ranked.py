"""Starts and compares runs of several ranks, which tests kill or stop."""

from __future__ import annotations

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


def last_weights(run: Path) -> bytes:
    weights = ranks.tensors_in(run / "checkpoints/step-00000030")
    return b"".join(weights[name].numpy().tobytes() for name in sorted(weights))


def numbers_of(record: dict[str, Any]) -> dict[str, float]:
    """Returns loss, norm, weight and metrics of a record. The loss is NaN if the weight of the step is 0."""
    own = {name: record[name] for name in ("loss", "grad_norm", "weight") if name in record}
    return {
        name: float(value) for name, value in {**own, **record.get("probed", {}), **record.get("metrics", {})}.items()
    }


def compare(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Fails if losses differ by more than 1e-6 (8 roundings of fp32 numbers in [1, 2]), or other numbers by 2e-6."""
    assert [record["kind"] for record in found] == [record["kind"] for record in wanted]
    for one, other in zip(found, wanted, strict=True):
        same = ("kind", "step", "lr", "samples", "tokens", "ids_hash", "skipped")
        assert {name: one.get(name) for name in same} == {name: other.get(name) for name in same}
        mine, theirs = numbers_of(one), numbers_of(other)
        assert mine == pytest.approx(theirs, rel=2e-6, abs=1e-6, nan_ok=True), (one["step"], mine, theirs)
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=0, abs=1e-6, nan_ok=True), (one["step"], mine, theirs)
