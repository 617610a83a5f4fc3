"""BatchNorm over the samples of all ranks is that of one process with the whole batch, and stays a plain BatchNorm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests import ranks
from tests.training.ranked import numbers_of
from trainwright.data.sample_order import epoch_order

pytestmark = [pytest.mark.process, pytest.mark.slow]

NET = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4)

    def forward(self, x):
        return x + torch.tanh(self.norm(self.conv(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.BatchNorm1d(4, momentum=None)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.bare = nn.BatchNorm1d(4, affine=False, track_running_stats=False)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.bare(hidden).flatten(1)) if self.training else self.head(hidden.flatten(1))

def data(dtype):
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(38, 4, 3, generator=draw, dtype=torch.float64), torch.randint(3, (38,), generator=draw)
    return (3 * x + 5).to(dtype), y

def model(dtype):
    torch.manual_seed(3)
    return Net().to(dtype)
"""
FIT = """
import json, sys
import torch
from torch import nn
import trainwright as tw
import net

given = json.loads(sys.argv[1])
dtype = getattr(torch, given.pop("dtype"))
(x, y), model = net.data(dtype), net.model(dtype)
exec(given.pop("change", ""))
result = tw.fit(model, (x, y), nn.CrossEntropyLoss(), val=(x[:23], y[:23]), until="7steps", lr=0.1, quiet=True,
                settings={"optimizer.use": "sgd", "optimizer.args": {"momentum": 0.9}, "batch.size": 12,
                          "log.every": "1steps", "log.doctor": False, "evaluation.every": "3steps", **given})
state = {name: value.double().tolist() for name, value in model.state_dict().items() if "shard" not in str(given)}
print(json.dumps({"run": str(result.run), "state": state, "norms": str(model)}))
"""


def trained(count: int, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """Return the report of each rank on its run."""
    folder.mkdir()
    (folder / "net.py").write_text(NET)
    return ranks.reports(FIT, count, json.dumps({"dtype": "float64", **settings}), cwd=folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return ranks.tensors_in(folder / "runs/run/checkpoints/step-00000007")


def steps(folder: Path) -> list[dict[str, float]]:
    log = map(json.loads, (folder / "runs/run/log.jsonl").read_text().splitlines())
    return [numbers_of(record) for record in log if record["kind"] in ("step", "evaluated")]


def tolerance(dtype: torch.dtype) -> float:
    """A statistic is of 36 values and a gradient of 12 samples, each sum rounded in another order, in 7 steps."""
    return torch.finfo(dtype).eps * 36 * 12 * 7


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_any_number_of_ranks_is_one_process_with_the_whole_batch(tmp_path: Path, dtype: str) -> None:
    """38 samples in batches of 12: the last step of an epoch has two, and a third rank none."""
    trained(1, tmp_path / "1", dtype=dtype, **{"batch.micro": 12})
    bound = tolerance(getattr(torch, dtype))
    for count, more in ((2, {}), (3, {"model.activation_checkpointing": "block"})):
        folder = tmp_path / str(count)
        each_rank = trained(
            count, folder, dtype=dtype, **{"parallel.sync_batchnorm": True, "batch.micro": 12 // count, **more}
        )
        assert all(rank["state"] == each_rank[0]["state"] for rank in each_rank)  # running statistics, too
        assert "Sync" not in each_rank[0]["norms"]
        for name, value in weights(folder).items():
            torch.testing.assert_close(value, weights(tmp_path / "1")[name], rtol=bound, atol=bound)
        assert len(steps(folder)) == len(steps(tmp_path / "1")) > 9
        for mine, theirs in zip(steps(folder), steps(tmp_path / "1"), strict=True):
            assert mine == pytest.approx(theirs, rel=max(bound, 1e-6), abs=1e-6)  # the log has seven digits


def test_sharded_ranks_have_the_same_statistics_and_without_the_setting_their_own(tmp_path: Path) -> None:
    trained(1, tmp_path / "1", **{"batch.micro": 12})
    trained(2, tmp_path / "shard", **{"parallel.sync_batchnorm": True, "parallel.shard": 2, "batch.micro": 6})
    trained(2, tmp_path / "own", **{"batch.micro": 6})
    bound, alone = tolerance(torch.float64), weights(tmp_path / "1")
    for name, value in weights(tmp_path / "shard").items():
        torch.testing.assert_close(value, alone[name], rtol=bound, atol=bound)
    own = weights(tmp_path / "own")
    assert max(float((own[name] - alone[name]).abs().max()) for name in alone) > 1e-3


def test_with_accumulation_a_statistic_is_of_the_micro_batches_that_ranks_compute_together(tmp_path: Path) -> None:
    """A plain loop does the same by hand, and the checkpoint loads into the plain model."""
    trained(2, tmp_path / "2", **{"parallel.sync_batchnorm": True, "batch.micro": 3})
    space: dict[str, Any] = {"__name__": "net"}
    exec(NET, space)
    model, (x, y) = space["model"](torch.float64), space["data"](torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(7):
        ids = epoch_order(38, seed=1337, epoch=step // 4)[step % 4 * 12 :][:12]
        shares = [np.array_split(share, -(-len(ids) // 6)) for share in np.array_split(ids, 2)]
        optimizer.zero_grad()
        for parts in zip(*shares, strict=True):
            together = np.concatenate(parts)
            (nn.functional.cross_entropy(model(x[together]), y[together]) * len(together) / len(ids)).backward()
        optimizer.step()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(weights(tmp_path / "2"), strict=True)
    bound = tolerance(torch.float64)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("x, y = x[:25], y[:25]", "one value per channel from all ranks together"),
        (
            "model.first = type('Odd', (nn.BatchNorm1d,), {'forward': lambda self, x: x})(4)",
            "a Odd overrides the forward pass",
        ),
        ("model.first = nn.SyncBatchNorm(4)", "parallel.sync_batchnorm: true, which exchanges statistics"),
    ],
)
def test_what_cannot_be_synchronised_is_refused_on_every_rank(tmp_path: Path, change: str, error: str) -> None:
    (tmp_path / "net.py").write_text(NET.replace("12, 3)", "4, 3)").replace("4, 3, generator", "4, 1, generator"))
    settings = {"dtype": "float32", "change": change, "parallel.sync_batchnorm": True, "batch.micro": 6}
    done = ranks.run(FIT, 2, json.dumps(settings), cwd=tmp_path)
    assert all(each.returncode == 1 and error in each.stderr for each in done), done[0].stderr + done[1].stderr
