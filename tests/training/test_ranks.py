"""A run of several ranks is the run of one process: the same losses, norms, weights and samples."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainwright as tw
from tests import forked, ranks
from tests.forked import COMMAND_LINE
from tests.training.ranked import compare, last_weights, make_project, train, wait_for_steps

pytestmark = [pytest.mark.process, pytest.mark.slow]

FIT = """
import json, os, sys
import torch
from torch import nn
import trainwright as tw

settings = json.loads(sys.argv[1])
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.LayerNorm(32), nn.Dropout(0.0), nn.Linear(32, 5))
draw = torch.Generator().manual_seed(0)
x, y = torch.randn(37, 12, generator=draw), torch.randint(5, (37,), generator=draw)
x_val, y_val = torch.randn(23, 12, generator=draw), torch.randint(5, (23,), generator=draw)
counted = torch.rand(5, generator=draw) + 0.5

def mean(output, target):
    return nn.functional.cross_entropy(output, target)

def weighted(model, batch):
    output, target = model(batch[0]), batch[1]
    weight = counted[target].sum()
    total = nn.functional.cross_entropy(output, target, weight=counted, reduction="sum")
    right = (output.argmax(1) == target).sum()
    return tw.Loss(total, weight, {"right": right.float()})

def sparse(model, batch):
    chosen = batch[1] == 2  # none, on some ranks; the head is not used there
    if not chosen.any():
        return tw.Loss(model[:3](batch[0]).sum() * 0, 0.0, {"right": torch.zeros(())})
    total = nn.functional.cross_entropy(model(batch[0][chosen]), batch[1][chosen], reduction="sum")
    return tw.Loss(total, float(chosen.sum()), {"right": chosen.float().sum()})

losses = {"mean": mean, "weighted": weighted, "sparse": sparse}
given = {"log.every": "1steps", "evaluation.every": "3steps", "schedule.use": "constant",
         "checkpoint.every": "3steps", "log.doctor": "RANK" in os.environ, **settings}  # alone it would run steps again
loss, until, resume = losses[given.pop("loss")], given.pop("until", "5steps"), given.pop("resume", None)
result = tw.fit(model, (x, y), loss, val=(x_val, y_val), until=until, lr=1e-2, precision="fp32", quiet=True,
                settings=given, resume=resume)
weights = torch.cat([p.detach().flatten() for p in model.parameters()]).double().tolist()
print(json.dumps({"run": str(result.run), "loss": result.loss, "val_loss": result.val_loss, "weights": weights}))
"""


def trained(count: int, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """Return the report of each rank on its run."""
    return ranks.reports(FIT, count, json.dumps(settings), cwd=folder)


def steps(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    log = next(folder.glob("runs/*/log.jsonl")).read_text().splitlines()
    return [record for record in map(json.loads, log) if record["kind"] in (kinds or ("step", "evaluated"))]


@pytest.mark.parametrize(
    ("loss", "micro", "counts"), [("mean", 2, (3,)), ("weighted", 12, (2,)), ("sparse", 2, (2, 3))]
)
def test_any_number_of_ranks_is_one_process(tmp_path: Path, loss: str, micro: int, counts: tuple[int, ...]) -> None:
    """37 samples in batches of 12: the last step of an epoch has one sample, and some ranks none."""
    settings: dict[str, Any] = {"loss": loss, "batch.size": 12, "batch.micro": micro}
    [alone] = trained(1, tmp_path / "1", **settings)
    for count in counts:
        each_rank = trained(count, tmp_path / str(count), **settings)
        assert all(one == each_rank[0] for one in each_rank)
        assert each_rank[0]["weights"] == pytest.approx(alone["weights"], abs=1e-6)
        assert each_rank[0]["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-6)
        assert len(list(tmp_path.glob(f"{count}/runs/*"))) == 1
        compare(steps(tmp_path / str(count)), steps(tmp_path / "1"))
        [[of_all], [by_layer]] = (steps(tmp_path / name, "layers") for name in (str(count), "1"))
        for name in ("grad_norm", "update_ratio"):  # written with four digits
            assert of_all[name] == pytest.approx(by_layer[name], rel=1e-3, abs=1e-6), name


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    [alone] = trained(1, tmp_path / "1", loss="weighted", until="9steps")
    for count, until in ((2, "3steps"), (3, "6steps"), (1, "9steps")):
        resume = None if count == 2 else "runs/run"
        seen = trained(count, tmp_path / "changing", loss="weighted", until=until, resume=resume)
    assert seen[0]["weights"] == pytest.approx(alone["weights"], abs=1e-6)
    logged = {record["step"]: record for record in steps(tmp_path / "changing") if record["kind"] == "step"}
    compare(list(logged.values()), [record for record in steps(tmp_path / "1") if record["kind"] == "step"])


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path)


TOKENS = """
class Tokens(Slow):
    def __getitem__(self, index):
        time.sleep(0.005)
        ids = torch.arange(index, index + 9) ** 2 % 11
        return ids[:-1], ids[1:]
"""
GPT = "{use: gpt, args: {vocab_size: 11, block_size: 8, layers: 2, heads: 2, d_model: 16, tied: false, dropout: 0.3}}"


@pytest.mark.examined
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["parallel.replicate=2"], id="replicate"),
        pytest.param(
            ["parallel.pipeline=2", f"model={GPT}", "data.train=slow:Tokens", "loss=language_model"], id="pipeline"
        ),
    ],
)
def test_a_killed_rank_ends_all_and_the_next_attempt_goes_on(project: Path, settings: list[str]) -> None:
    with (project / "slow.py").open("a") as module:
        module.write(TOKENS)
    settings = [word for each in settings for word in ("--set", each)]
    assert [each.wait() for each in train(project, "undisturbed", 0, *settings)] == [0, 0]
    log = project / "killed/run/log.jsonl"
    started = train(project, "killed", 0, *settings)
    wait_for_steps(log, 7, started)
    os.kill(started[0].pid, signal.SIGKILL)
    assert started[0].wait() == -signal.SIGKILL
    assert started[1].wait() == 1 and "another rank has ended" in started[1].stderr
    last = train(project, "killed", 1, *settings, "--json", "--set", "log.doctor=true")
    assert [each.wait() for each in last] == [0, 0]
    assert "resumed from" in last[0].stderr and last[1].stdout == ""
    assert "the ranks were compared in" in last[0].stderr
    result = json.loads(last[0].stdout.splitlines()[-1])
    assert (result["step"], result["ending"], Path(result["run"])) == (30, "finished", project / "killed/run")
    assert [path.name for path in (project / "killed").iterdir()] == ["run"]
    assert last_weights(project / "killed/run") == last_weights(project / "undisturbed/run")


def test_sigterm_saves_once_and_ends_every_rank(project: Path) -> None:
    started = train(project, "runs")
    wait_for_steps(project / "runs/run/log.jsonl", 5, started)
    for each in (*started, *started):  # torchrun passes on what the scheduler has sent to every process
        each.send_signal(signal.SIGTERM)
    assert [each.wait() for each in started] == [75, 75]
    assert "runs/run -- --nproc-per-node 2   # continues from" in started[0].stdout
    ended = json.loads((project / "runs/run/log.jsonl").read_text().splitlines()[-1])
    newest = max(path.name for path in (project / "runs/run/checkpoints").glob("step-*"))
    assert (ended["ending"], ended["reason"]) == ("stopped", "SIGTERM") and newest == f"step-{ended['step']:08d}"


def test_a_launch_of_one_rank_goes_on(project: Path) -> None:
    """As a job of a scheduler that is queued again, or when torchrun starts its only rank again."""
    (started,) = train(project, "runs", count=1)
    wait_for_steps(project / "runs/run/log.jsonl", 7, [started])
    started.send_signal(signal.SIGKILL)
    assert started.wait() == -signal.SIGKILL
    (last,) = train(project, "runs", 1, count=1)
    assert last.wait() == 0 and "resumed from" in last.stdout
    assert [path.name for path in (project / "runs").iterdir()] == ["run"]


def test_tasks_of_srun_that_are_no_ranks_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    data = torch.randn(8, 4), torch.randint(2, (8,))
    tw.fit(nn.Linear(4, 2), data, nn.CrossEntropyLoss(), steps=1, settings={"log.doctor": False})
    assert "each of the 4 tasks of srun or mpirun trains a run of its own" in capsys.readouterr().out


def test_what_cannot_work_is_refused_before_the_ranks_meet(project: Path) -> None:
    words = ["train", str(project / "recipe.yaml"), "--set", "parallel.replicate=3", "--", "--nproc-per-node", "2"]
    refused = forked.run(COMMAND_LINE, *words, cwd=project)
    assert refused.returncode == 2 and "must be the number of ranks, 2" in refused.stderr
    assert "--nproc-per-node 3" in refused.stderr
    mistaken = forked.run(COMMAND_LINE, "train", str(project / "recipe.yaml"), "--", "4", cwd=project)
    assert mistaken.returncode == 2 and "'4' is not an option of torchrun" in mistaken.stderr


def test_a_script_may_train_twice_and_each_run_is_its_own(tmp_path: Path) -> None:
    """The ranks meet anew, and the second run does not take itself for the first one, started again."""
    twice = FIT.replace(
        "result = tw.fit(", "first = tw.fit(model, (x, y), loss, until=until, quiet=True)\nresult = tw.fit("
    )
    ranks.finish(twice, 2, json.dumps({"loss": "mean", "until": "2steps"}), cwd=tmp_path)
    assert sorted(path.name for path in tmp_path.glob("runs/*")) == ["run", "run-2"]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("x += float(os.environ['RANK'])", "rank 1 has different data in data.train than rank 0"),
        ("model = nn.Sequential(model, nn.SyncBatchNorm(5))", "SyncBatchNorm"),
    ],
)
def test_ranks_that_would_not_train_one_run_are_refused(tmp_path: Path, change: str, error: str) -> None:
    code = FIT.replace("given = {", f"{change}\ngiven = {{", 1)
    done = ranks.run(code, 2, json.dumps({"loss": "mean"}), cwd=tmp_path)
    assert all(each.returncode == 1 and error in each.stderr for each in done), done[0].stderr


def test_weights_are_those_of_the_first_rank(tmp_path: Path) -> None:
    """Also where a weight does not lie in memory row after row, as in channels_last."""
    code = FIT.replace("torch.manual_seed(3)", "torch.manual_seed(int(os.environ['RANK']))", 1)
    code = code.replace("draw = ", "model[0].weight = nn.Parameter(torch.randn(12, 32).t())\ndraw = ", 1)
    settings = {"loss": "mean", "model.ema": 0.9}
    done = ranks.run(code, 2, json.dumps(settings), cwd=tmp_path)
    first, second = (json.loads(each.stdout.splitlines()[-1]) for each in done)
    assert first == second


@pytest.mark.parametrize(("loss", "count"), [("mean", 4), ("sparse", 2)])
def test_exact_gives_the_same_bits_on_any_number_of_ranks(tmp_path: Path, loss: str, count: int) -> None:
    """37 samples in batches of 12: steps of 6 slices, and one of a single slice."""
    settings: dict[str, Any] = {
        "loss": loss,
        "batch.size": 12,
        "batch.micro": 2,
        "parallel.exact": True,
        "until": "8steps",
    }
    [alone] = trained(1, tmp_path / "1", **settings)
    norms = [(one.get("loss"), one.get("grad_norm")) for one in steps(tmp_path / "1") if one["kind"] == "step"]
    each_rank = trained(count, tmp_path / str(count), **settings)
    assert {str(one["weights"]) for one in each_rank} == {str(alone["weights"])}
    seen = [(one.get("loss"), one.get("grad_norm")) for one in steps(tmp_path / str(count)) if one["kind"] == "step"]
    assert seen == norms
    without = trained(2, tmp_path / "without", **{**settings, "parallel.exact": False})
    assert without[0]["weights"] != alone["weights"]  # so the test can fail
