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


def measured(folder: Path, count: int, recipe: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures of each record of a run on so many ranks."""
    folder.mkdir()
    (folder / "mine_ranked.py").write_text(MODULE)
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    done = ranks.run(COMMAND_LINE, count, "train", "recipe.yaml", cwd=folder)
    assert [each.returncode for each in done] == [0] * count, "\n".join(each.stderr for each in done)
    lines = map(json.loads, (folder / "runs/run/log.jsonl").read_text().splitlines())
    kinds = {"step": "probed", "evaluated": "metrics"}
    return [{"at": (x["kind"], x["step"]), **x[kinds[x["kind"]]]} for x in lines if x["kind"] in kinds]


@pytest.mark.parametrize("parallel", [{}, {"shard": 2}, {"exact": True}], ids=["replicate", "shard", "exact"])
def test_metrics_of_two_ranks_are_those_of_one_process(tmp_path: Path, parallel: dict[str, Any]) -> None:
    """37 samples in steps of 12 leave one for the last step of an epoch: a rank has none. 23 are evaluated."""
    exact = {"exact": True} if "exact" in parallel else {}
    alone = measured(tmp_path / "1", 1, {**RECIPE, "parallel": exact})
    both = measured(tmp_path / "2", 2, {**RECIPE, "parallel": parallel})
    assert set(alone[0]) == {"at", "accuracy", "f1", "auroc", "hits", "Merged", "label"}
    assert [each["at"] for each in alone] == [each["at"] for each in both]
    for one, other in zip(alone, both, strict=True):
        assert one["hits"] == one["Merged"]
        assert one.pop("at") == other.pop("at")
        assert other == pytest.approx(one, rel=1e-5)


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
