"""Ready batches on several ranks: each goes over all and trains its rows, and the run is that of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.training.ranked import compare

pytestmark = [pytest.mark.process, pytest.mark.slow]

FIT = """
import json, os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
import trainwright as tw

given = json.loads(sys.argv[1])
rank = int(os.environ.get("RANK", 0))
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
draw = torch.Generator().manual_seed(0)
x, y = torch.randn(40, 6, generator=draw), torch.randint(3, (40,), generator=draw)
counted = torch.rand(3, generator=draw) + 0.5

def function():
    order = torch.randperm(40)
    return ({"x": x[rows], "rows": rows.tolist(), "y": y[rows]} for rows in order.split([9, 7, 1, 8, 2, 13]))

class Stream(IterableDataset):
    def __iter__(self):
        yield from function()

class Loader(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield {"x": batch[0] + 0.1 * torch.randn(6), "rows": [], "y": batch[1]}

class Position:
    def __init__(self):
        self.number = 0

    def __iter__(self):
        parts = list(zip(x.split(7), y.split(7)))
        while self.number < len(parts):
            self.number += 1
            yield {"x": parts[self.number - 1][0], "rows": [], "y": parts[self.number - 1][1]}
        self.number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, saved):
        self.number = saved["number"]

def apart():
    return ({"x": x[rows], "rows": [], "y": y[rows]} for rows in torch.randperm(40).split(8 + rank))

class Graphs:
    num_graphs = 4

def graphs():
    return iter([Graphs()])

def weighted(model, batch):
    output = model(batch["x"])
    total = nn.functional.cross_entropy(output, batch["y"], weight=counted, reduction="sum")
    return tw.Loss(total, counted[batch["y"]].sum())

kinds = {"function": lambda: function,
         "stream of workers": lambda: DataLoader(Stream(), batch_size=None, num_workers=2),
         "loader": lambda: Loader(torch.utils.data.TensorDataset(x, y), batch_size=6, shuffle=True),
         "state": Position, "apart": lambda: apart, "graphs": lambda: graphs}
made = kinds[given.pop("kind")]
until, resume = given.pop("until", "9steps"), given.pop("resume", None)
result = tw.fit(model, made(), weighted, val=function, until=until, lr=1e-2, quiet=True, resume=resume,
                settings={"log.every": "1steps", "evaluation.every": "3steps", "schedule.use": "constant",
                          "precision": "fp32", "checkpoint.every": "3steps", "log.doctor": False, **given}, seed=1337)
print(json.dumps([p.double().tolist() for p in model.parameters()]) if "parallel.shard" not in given else "[]")
"""


def trained(count: int, folder: Path, **settings: Any) -> list[Any]:
    """The weights of each rank."""
    return ranks.reports(FIT, count, json.dumps(settings), cwd=folder)


def steps(folder: Path) -> list[dict[str, Any]]:
    log = map(json.loads, next(folder.glob("runs/*/log.jsonl")).read_text().splitlines())
    return [record for record in log if record["kind"] in ("step", "evaluated")]


@pytest.mark.parametrize(
    ("kind", "settings", "counts"),
    [
        ("function", {}, (2, 3)),
        ("function", {"batch.accumulation": 2, "parallel.shard": 2}, (2,)),
        ("stream of workers", {"batch.accumulation": 4}, (2,)),
        ("loader", {"evaluation.batches": 2}, (3,)),
    ],
)
def test_any_number_of_ranks_is_one_process(
    tmp_path: Path, kind: str, settings: dict[str, Any], counts: tuple[int, ...]
) -> None:
    """Batches of 1 and 2 rows are among them, so that ranks have none."""
    alone = {name: value for name, value in settings.items() if name != "parallel.shard"}
    trained(1, tmp_path / "1", kind=kind, **alone)
    for count in counts:
        each_rank = trained(count, tmp_path / str(count), kind=kind, **settings)
        assert all(rank == each_rank[0] for rank in each_rank)
        compare(steps(tmp_path / str(count)), steps(tmp_path / "1"))


@pytest.mark.parametrize("kind", ["function", "state"])
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path, kind: str) -> None:
    """In mid-epoch: batches are read again, or every rank's iterator goes on from its own state."""
    trained(1, tmp_path / "1", kind=kind)
    for count, until in ((2, "4steps"), (3, "7steps"), (1, "9steps")):
        resume = None if count == 2 else "runs/run"
        trained(count, tmp_path / "changing", kind=kind, until=until, resume=resume)
    found = {record["step"]: record for record in steps(tmp_path / "changing") if record["kind"] == "step"}
    compare(list(found.values()), [record for record in steps(tmp_path / "1") if record["kind"] == "step"])


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("apart", "rank 1 read other data in epoch 0 than rank 0"),
        ("graphs", "2 ranks share the rows of a ready batch, and this has none to share"),
    ],
)
def test_what_ranks_cannot_share_is_refused_with_a_remedy(tmp_path: Path, kind: str, error: str) -> None:
    done = ranks.run(FIT, 2, json.dumps({"kind": kind}), cwd=tmp_path)
    assert all(each.returncode == 1 and error in each.stderr for each in done), done[0].stderr
    assert all("remedy: give " in each.stderr for each in done)
