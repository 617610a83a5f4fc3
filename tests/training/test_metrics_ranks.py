"""Metrics of several ranks are those of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.forked import COMMAND_LINE

pytestmark = [pytest.mark.process, pytest.mark.slow]

MODULE = """
import torch
import trainwright as tw

draw = torch.Generator().manual_seed(0)
x, y = torch.randn(37, 8, generator=draw), torch.randint(3, (37,), generator=draw)

def train_set():
    return torch.utils.data.TensorDataset(x, y)

def val_set():
    return torch.utils.data.TensorDataset(x[:23] + 0.1, y[:23])

def hits(outputs, targets):
    return float((outputs.argmax(1) == targets).sum())

class Merged:
    def __init__(self):
        self.reset()

    def update(self, outputs, targets):
        self.hits += int((outputs.argmax(1) == targets).sum())

    def merge_state(self, metrics):
        self.hits += sum(each.hits for each in metrics)

    def compute(self):
        return float(self.hits)

    def reset(self):
        self.hits = 0

def loss(model, batch):
    output = model(batch[0])
    found = torch.nn.functional.cross_entropy(output, batch[1], reduction="sum")
    tw.log(label=batch[1].float().mean())
    return tw.Loss(found, len(output), outputs=output, targets=batch[1])
"""
RECIPE: dict[str, Any] = {
    "until": "9steps",
    "model": {"use": "mlp", "args": {"sizes": [8, 16, 3]}},
    "data": {"train": "mine_ranked:train_set", "val": "mine_ranked:val_set"},
    "loss": "mine_ranked:loss",
    "batch": {"size": 12, "micro": 6},
    "precision": "fp32",
    "metrics": ["accuracy", "f1", "auroc", "mine_ranked:hits", "mine_ranked:Merged"],
    "log": {"every": "3steps", "doctor": False},
    "evaluation": {"every": "3steps", "batch": 5},
    "checkpoint": {"best": "accuracy", "best_mode": "max"},
}


TRAIN = "import sys, trainwright as tw; [tw.train(tw.load(path), quiet=True) for path in sys.argv[1:]]"
Measured = dict[str, list[dict[str, Any]]]
"""The figures of each record, by the name of the run."""


def measured(folder: Path, count: int, runs: dict[str, dict[str, Any]]) -> Measured:
    """Train with each of the parallel sections, one after another in the same processes."""
    (folder / "mine_ranked.py").write_text(MODULE)
    for name, parallel in runs.items():
        (folder / f"{name}.yaml").write_text(json.dumps({**RECIPE, "name": name, "parallel": parallel}))
    done = ranks.run(TRAIN, count, *(f"{name}.yaml" for name in runs), cwd=folder)
    assert [each.returncode for each in done] == [0] * count, "\n".join(each.stderr for each in done)
    return {name: figures(folder / "runs" / name) for name in runs}


def figures(run: Path) -> list[dict[str, Any]]:
    kinds = {"step": "probed", "evaluated": "metrics"}
    lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [{"at": (x["kind"], x["step"]), **x[kinds[x["kind"]]]} for x in lines if x["kind"] in kinds]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return measured(tmp_path_factory.mktemp("alone"), 1, {"plain": {}, "exact": {"exact": True}})


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    runs = {"replicate": {}, "shard": {"shard": 2}, "exact": {"exact": True}}
    return measured(tmp_path_factory.mktemp("both"), 2, runs)


@pytest.mark.parametrize("layout", ["replicate", "shard", "exact"])
def test_metrics_of_two_ranks_are_those_of_one_process(layout: str, alone: Measured, both: Measured) -> None:
    """37 samples in steps of 12 leave one for the last step of an epoch: a rank has none. 23 are evaluated."""
    expected, found = alone["exact" if layout == "exact" else "plain"], both[layout]
    assert set(expected[0]) == {"at", "accuracy", "f1", "auroc", "hits", "Merged", "label"}
    assert [each["at"] for each in expected] == [each["at"] for each in found]
    for one, other in zip(expected, found, strict=True):
        assert one["hits"] == one["Merged"]
        assert {**other, "at": 0} == pytest.approx({**one, "at": 0}, rel=1e-5)


def test_a_metric_that_cannot_be_joined_says_so_before_the_first_step(tmp_path: Path) -> None:
    """An object of the user's own says nothing of how its state is joined."""
    own = """
class Own:
    def update(self, outputs, targets): pass
    def compute(self): return 0.0
    def reset(self): pass
"""
    (tmp_path / "mine_ranked.py").write_text(MODULE + own)
    (tmp_path / "recipe.yaml").write_text(json.dumps({**RECIPE, "metrics": ["mine_ranked:Own"]}))
    done = ranks.run(COMMAND_LINE, 2, "train", "recipe.yaml", cwd=tmp_path)
    assert [each.returncode for each in done] == [2, 2]
    assert "'Own', a Own, cannot be joined over several ranks" in done[0].stderr and "merge_state" in done[0].stderr
