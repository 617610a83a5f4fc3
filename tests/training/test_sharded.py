"""A run whose weights are divided among ranks is the run of one process, and its checkpoints are those of one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ranks
from tests.training.ranked import compare
from trainwright.checkpoint.manifest import verify

pytestmark = [pytest.mark.process, pytest.mark.slow]

FIT = """
import json, os, sys
import torch
from torch import nn
import trainwright as tw
from trainwright.checkpoint.shards import local

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(12, 7), nn.Linear(7, 5)
        self.blocks = nn.ModuleList(Block(7) for _ in range(3))
        self.blocks[2].mlp[0].weight = self.blocks[1].mlp[0].weight
        self.rare, self.never = nn.Linear(7, 7), nn.Linear(3, 3)
        self.scale, self.idle = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        hidden = self.inner(x)
        for block in self.blocks:
            hidden = block(hidden)
        chosen = x[:, :1] > 1.2
        if chosen.any():  # on some ranks only
            hidden = hidden + chosen * self.rare(hidden)
        return self.head(torch.tanh(hidden)) * self.scale

draw = torch.Generator().manual_seed(0)
x, y = torch.randn(37, 12, generator=draw), torch.randint(5, (37,), generator=draw)
x_val, y_val = torch.randn(23, 12, generator=draw), torch.randint(5, (23,), generator=draw)
counted = torch.rand(5, generator=draw) + 0.5

def mean(output, target):
    return nn.functional.cross_entropy(output, target)

def weighted(model, batch):
    output, target = model(batch[0]), batch[1]
    total = nn.functional.cross_entropy(output, target, weight=counted, reduction="sum")
    return tw.Loss(total, counted[target].sum(), {"right": (output.argmax(1) == target).sum().float()})

for given in json.loads(sys.argv[1]):
    torch.manual_seed(3)
    model = Net()
    given = {"log.every": "1steps", "evaluation.every": "3steps", "schedule.use": "constant",
             "log.doctor": "RANK" in os.environ, **given}  # alone it would run each step again
    loss = {"mean": mean, "weighted": weighted}[given.pop("loss")]
    until, resume = given.pop("until", "4steps"), given.pop("resume", None)
    inputs = x.clone()
    inputs[30] *= given.pop("outlier", 1.0)
    result = tw.fit(model, (inputs, y), loss, val=(x_val, y_val), until=until, lr=1e-2, quiet=True, resume=resume,
                    settings={"batch.size": 12, "precision": "fp32", "checkpoint.every": None, "checkpoint.best": None,
                              **given})
    moments = [value for own in result.state.optimizer.state.values() for value in own.values() if value.dim()]
    held = sum(local(each).numel() for each in (*model.parameters(), *moments))
    print(json.dumps({"run": str(result.run), "val_loss": result.val_loss, "held": held}))
"""

CASES: list[dict[str, Any]] = [
    {"loss": "mean", "parallel.zero": 3, "model.ema": 0.9},
    {"loss": "weighted", "parallel.zero": 2, "batch.micro": 2, "optimizer.clip.by": "norm", "optimizer.clip.at": 0.2},
    {"loss": "weighted", "parallel.zero": 1, "batch.micro": 2, "optimizer.clip.by": "agc", "optimizer.clip.at": 0.05},
    {
        "loss": "weighted",
        "parallel.zero": 3,
        "batch.micro": 2,
        "optimizer.use": "sgd",
        "outlier": math.inf,  # one step is skipped, on all ranks
        "optimizer.clip.by": "value",
        "optimizer.clip.at": 0.01,
        "model.activation_checkpointing": "block",
    },
    {"loss": "mean", "parallel.zero": 2, "model.swa": {"start": "2steps", "every": "1steps", "lr": 0.005}},
    {"loss": "mean", "parallel.zero": 1},
]
"""Each ZeRO with one micro-batch and, on two ranks, with three."""


def trained(count: int, folder: Path, cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the report of each rank on its runs."""
    done = ranks.finish(FIT, count, json.dumps(cases), cwd=folder)
    return [[json.loads(line) for line in each.stdout.splitlines() if line.startswith("{")] for each in done]


def steps_of(folder: Path, run: str) -> list[dict[str, Any]]:
    log = (folder / run / "log.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, log) if record["kind"] in ("step", "evaluated")]


def assert_same_layers(run: Path, other: Path) -> None:
    """Statistics by layer: 4 digits are written. What the layers return is that of each rank's own samples."""
    logs = [(each / "log.jsonl").read_text().splitlines() for each in (run, other)]
    (mine,), (theirs,) = ([each for each in map(json.loads, log) if each["kind"] == "layers"] for log in logs)
    assert (mine["step"], mine["layers"]) == (theirs["step"], theirs["layers"]) and mine["act_log2"][0]
    for name in ("grad_norm", "update_ratio"):
        ours, alone = (list(map(float, each[name])) for each in (mine, theirs))
        assert ours == pytest.approx(alone, rel=2e-3, abs=1e-7, nan_ok=True), name


def assert_same_state(run: Path, other: Path, step: int) -> None:
    """Weights, moments and averages, name by name; random numbers are each rank's own."""
    for part in ("model", "rest"):
        mine, theirs = (ranks.tensors_in(each / f"checkpoints/step-{step:08d}", part) for each in (run, other))
        assert mine.keys() == theirs.keys()
        assert {
            n for n in mine if not n.startswith("rng") and not torch.allclose(mine[n], theirs[n], atol=2e-6)
        } == set()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The cases in one process."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, trained(1, folder, CASES)[0]


@pytest.mark.parametrize(
    ("count", "shards"), [(2, {0: 2, 1: 2, 2: 2, 3: 2, 4: 2, 5: 2}), (4, {0: 4, 1: 4, 2: 2, 3: 2})], ids=["2", "4"]
)
def test_any_layout_is_one_process(
    tmp_path: Path, alone: tuple[Path, list[dict[str, Any]]], count: int, shards: dict[int, int]
) -> None:
    """Each case, and among how many its weights are divided.

    37 samples in batches of 12: the fourth step has one sample, and some ranks none. Of 5 rows, rank 4 has none.
    """
    each_rank = trained(count, tmp_path, [{**CASES[case], "parallel.shard": shard} for case, shard in shards.items()])
    folder, wanted = alone[0], [alone[1][case] for case in shards]
    for runs in each_rank:
        held = [run.pop("held") for run in runs]
        bounds = [1.25 * run["held"] / shard for run, shard in zip(wanted, shards.values(), strict=True)]
        assert all(mine <= bound for mine, bound in zip(held, bounds, strict=True))
    assert all(one == each_rank[0] for one in each_rank)
    for ours, theirs in zip(each_rank[0], wanted, strict=True):
        assert_same_state(tmp_path / ours["run"], folder / theirs["run"], 4)
        assert ours["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-6)
        compare(steps_of(tmp_path, ours["run"]), steps_of(folder, theirs["run"]))
        assert_same_layers(tmp_path / ours["run"], folder / theirs["run"])


def test_a_run_goes_on_in_any_layout(tmp_path: Path) -> None:
    """Checkpoints are those of one process, name by name, whichever layout wrote them."""
    case = {"loss": "weighted", "batch.micro": 2, "model.ema": 0.9, "name": "run", "checkpoint.keep": 9}
    case["checkpoint.best"] = "loss"  # is kept when the ranks have seen it together
    trained(1, tmp_path / "1", [{**case, "until": "8steps", "checkpoint.every": "2steps"}])
    layouts = [(2, {"parallel.shard": 2}), (4, {"parallel.shard": 2}), (1, {}), (2, {"parallel.replicate": 2})]
    for number, (count, layout) in enumerate(layouts):
        goes_on = {"until": f"{2 * number + 2}steps", "resume": "runs/run" if number else None}
        trained(count, tmp_path / "n", [{**case, **layout, **goes_on}])
    logged = {record["step"]: record for record in steps_of(tmp_path / "n", "runs/run") if record["kind"] == "step"}
    compare(list(logged.values()), [each for each in steps_of(tmp_path / "1", "runs/run") if each["kind"] == "step"])
    for step in (2, 4, 6, 8):
        assert_same_state(tmp_path / "n/runs/run", tmp_path / "1/runs/run", step)


def test_memory_that_runs_out_on_one_rank_ends_all(tmp_path: Path) -> None:
    """They cannot begin the step again together, nor save; the checkpoint before is whole."""
    short = """
        Net.calls = getattr(Net, "calls", 0) + torch.is_grad_enabled()
        if Net.calls > 12 and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory")
        hidden = self.inner(x)"""
    code = FIT.replace("        hidden = self.inner(x)", short.lstrip("\n"))
    case = {"loss": "mean", "until": "40steps", "checkpoint.every": "1steps", "parallel.shard": 2}
    done = ranks.run(code, 2, json.dumps([case]), cwd=tmp_path)
    assert [each.returncode for each in done] == [1, 1]
    assert "another rank has ended" in done[0].stderr
    assert "ranks that divide the weights cannot begin a step again, so the run ends" in done[1].stderr
    newest = max((tmp_path / "runs/run/checkpoints").glob("step-*"))
    verify(newest)
    trained = [record["step"] for record in steps_of(tmp_path, "runs/run") if record["kind"] == "step"]
    assert int(newest.name.removeprefix("step-")) == trained[-1]


def test_a_weight_that_is_used_without_its_module_is_named(tmp_path: Path) -> None:
    code = FIT.replace("            hidden = block(hidden)", "            hidden = block.forward(hidden)")
    done = ranks.run(code, 2, json.dumps([{"loss": "mean", "parallel.shard": 2}]), cwd=tmp_path)
    assert [each.returncode for each in done] == [1, 1]
    assert all("computes with a weight that is not gathered" in each.stderr for each in done)


MODELS = """
import json, sys
import torch
import trainwright as tw
from trainwright.engine.losses import language_model
from trainwright.models.gpt import gpt
from trainwright.models.lstm import lstm
from trainwright.models.resnet import resnet

draw = torch.Generator().manual_seed(0)
ids = torch.randint(17, (10, 9), generator=draw)
text = (ids[:, :-1], ids[:, 1:])
images = (torch.randn(10, 3, 8, 8, generator=draw), torch.randint(4, (10,), generator=draw))
made = [
    (lambda: gpt(vocab_size=17, block_size=8, layers=2, heads=2, d_model=12, positions="rope"), text, language_model),
    (lambda: lstm(vocab_size=17, d_model=7), text, language_model),
    (lambda: resnet(depth=8, classes=4, width=3), images, torch.nn.functional.cross_entropy),
]
for make, data, loss in made:
    torch.manual_seed(1)
    result = tw.fit(make(), data, loss, val=data, until="3steps", lr=1e-2, precision="fp32", quiet=True,
                    settings={"batch.size": 4, "log.every": "1steps", "log.doctor": False, **json.loads(sys.argv[1])})
    print(json.dumps({"run": str(result.run), "val_loss": result.val_loss}))
"""


def test_the_models_in_the_box(tmp_path: Path) -> None:
    for count, layout in ((1, {}), (2, {"parallel.shard": 2})):
        (tmp_path / str(count)).mkdir()
        done = ranks.finish(MODELS, count, json.dumps(layout), cwd=tmp_path / str(count))
        said = [json.loads(line) for line in done[0].stdout.splitlines() if line.startswith("{")]
    assert len(said) == 3
    for each in said[:2]:
        compare(steps_of(tmp_path / "2", each["run"]), steps_of(tmp_path / "1", each["run"]))
