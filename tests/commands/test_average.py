"""The mean of checkpoints against the mean by hand, from a real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import trainwright as tw
from trainwright.checkpoint.codec import same_bits
from trainwright.checkpoint.store import checkpoints
from trainwright.cli import app
from trainwright.commands.average import average_checkpoints
from trainwright.errors import UsageError

pytestmark = [pytest.mark.process, pytest.mark.slow]  # a run starts threads that read the machine


class Tied(nn.Module):
    """Two names of one weight, BatchNorm, and a weight in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.norm(self.one(x))) * self.scale


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the checkpoints of steps 2, 4, 6 and 8."""
    torch.manual_seed(0)
    data = torch.randn(64, 4), torch.randint(4, (64,))
    settings = {"checkpoint.every": "2steps", "checkpoint.keep": 4, "log.doctor": False, "folder": str(tmp_path)}
    return tw.fit(Tied(), data, nn.CrossEntropyLoss(), lr=0.1, batch=8, steps=8, quiet=True, settings=settings).run


def test_it_is_the_mean_by_hand(run: Path) -> None:
    done = CliRunner().invoke(app, ["average", str(run), "--last", "3", "-o", str(run / "mean"), "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["steps"], told["tensors"]) == (0, [8, 6, 4], 10)
    written = load_file(run / "mean" / "model.safetensors")
    kept = [load_file(path / "model.safetensors") for path in checkpoints(run / "checkpoints")[:3]]
    for name, value in written.items():
        source = name if name in kept[0] else "one.weight"
        parts = [each[source] for each in kept]
        mean = parts[0] if name.endswith("num_batches_tracked") else sum(part.double() for part in parts) / 3
        assert isinstance(mean, torch.Tensor)
        assert same_bits(value, mean.to(parts[0].dtype)), name
    assert not same_bits(written["scale"], kept[0]["scale"])
    Tied().load_state_dict(written)


def test_a_damaged_checkpoint_is_stepped_over(run: Path) -> None:
    (run / "checkpoints" / "step-00000006" / "model.safetensors").write_bytes(b"")
    found = average_checkpoints(run, last=3)
    assert found.steps == (8, 4, 2)
    assert found.path == run / "export" / "average-of-3-step-00000008"
    assert "step-00000006" in found.stepped_over[0]


def test_fewer_checkpoints_than_requested(run: Path) -> None:
    with pytest.raises(UsageError, match="has 4 checkpoints that verify, and 5 are requested") as caught:
        average_checkpoints(run)
    assert "--last 4" in caught.value.remedy and "checkpoint.keep: 5" in caught.value.remedy
    assert not (run / "export" / "average-of-5-step-00000008").exists()
