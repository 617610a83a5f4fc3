"""Runs that go on otherwise than they began: another length, batch, code, and what is told of it."""

from __future__ import annotations

import json
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset
from typer.testing import CliRunner

import trainwright as tw
from trainwright.checkpoint.store import checkpoints
from trainwright.cli import app
from trainwright.errors import CheckpointError, RecipeError, UsageError

pytestmark = pytest.mark.slow

SETTINGS = {"device": "cpu", "precision": "fp32", "log.doctor": False}


class Watch:
    """Keeps the learning rates, and stops after a step."""

    def __init__(self, last: int | None = None) -> None:
        self.last, self.lrs = last, dict[int, float]()

    def observe(self, result: tw.StepResult, state: tw.TrainState) -> tw.Stop | None:
        self.lrs[result.step] = result.lr
        return tw.Stop("enough") if result.step == self.last else None

    def close(self) -> None: ...


def data(count: int = 256) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 8, generator=generator), torch.arange(count) % 2)


def train(settings: dict[str, Any], *, last: int | None = None, dataset: Any = None, **short: Any) -> tuple[Any, Watch]:
    watch = Watch(last)
    torch.manual_seed(0)
    model, dataset = nn.Linear(8, 2), dataset or data()
    short = {"quiet": True, **short}
    return tw.fit(
        model, dataset, nn.CrossEntropyLoss(), settings={**SETTINGS, **settings}, observers=[watch], **short
    ), watch


@pytest.mark.parametrize(
    ("length", "remedy"), [("1ep", "add epochs=2"), ("8steps", "add steps=16"), ("64samples", "add until='128samples'")]
)
def test_a_finished_run_of_python_needs_an_argument_of_fit(length: str, remedy: str) -> None:
    train({}, until=length)
    with pytest.raises(UsageError, match="already reached its end") as caught:
        train({}, until=length, resume="runs/run")
    assert caught.value.remedy == remedy


def test_what_follows_from_a_fatal_change_is_not_to_be_accepted() -> None:
    """The default weight decay of SGD differs from that of AdamW."""
    train({}, steps=4)
    with pytest.raises(UsageError, match="weight_decay") as caught:
        train({}, steps=8, resume="runs/run", optimizer="sgd")
    assert caught.value.remedy == "undo what is fatal, then: tw.fit(..., resume='runs/run')"


def planned(run: Path) -> Any:
    return json.loads((run / "plan.json").read_text())


@pytest.mark.parametrize("until", ["600s", "100s"])
def test_a_warm_up_in_steps_is_of_so_many_steps_also_by_the_clock(until: str) -> None:
    settings = {"schedule.use": "constant", "schedule.warmup": "50steps"}
    begun, _ = train(settings, until="600s", lr=0.1, last=20)
    _, watch = train(settings, until=until, lr=0.1, last=60, resume=begun.run, accept="until")
    assert [watch.lrs[step] for step in (21, 40, 50, 60)] == pytest.approx([0.042, 0.08, 0.1, 0.1])


def test_a_warm_up_that_is_a_share_keeps_its_seconds() -> None:
    settings = {"schedule.warmup": "0.1run"}
    begun, _ = train(settings, until="600s", last=5)
    assert planned(begun.run)["warmup"] == 0.1
    for last, until, share in ((6, "600s", 0.1), (7, "1200s", 0.05), (8, "60s", 1.0)):
        ended, _ = train(settings, until=until, last=last, resume=begun.run, accept="until")
        assert planned(ended.run)["warmup"] == pytest.approx(share)
    with pytest.raises(RecipeError, match="the warm-up of 60 s is not shorter than the run of 40 s"):
        train(settings, until="40s", resume=begun.run, accept="until")


def test_a_run_that_becomes_shorter_than_its_warm_up() -> None:
    settings = {"schedule.use": "cosine", "schedule.warmup": "0.2run"}
    begun, _ = train(settings, until="400steps", last=20)
    with pytest.raises(RecipeError, match="the warm-up of 80 steps is not shorter than the run of 60 steps"):
        train(settings, until="60steps", resume=begun.run, accept="until")


def test_a_longer_run_deletes_nothing_that_was_kept_for_ever() -> None:
    settings = {"checkpoint.every": "5steps", "checkpoint.keep": 1, "checkpoint.keep_every": "0.25run"}
    begun, _ = train(settings, until="40steps")
    ended, _ = train(settings, until="80steps", resume=begun.run)
    steps = [int(path.name.removeprefix("step-")) for path in checkpoints(ended.run / "checkpoints")]
    assert steps == [80, 70, 60, 50, 40, 30, 20, 10]
    asked_anew, _ = train({**settings, "checkpoint.keep_every": "0.5run"}, until="81steps", resume=begun.run)
    assert planned(asked_anew.run)["keep_every"] == 40


@pytest.mark.parametrize("until", ["4ep", "1024samples"])
def test_what_is_left_of_a_run_takes_steps_of_the_new_batch(until: str) -> None:
    """256 samples, 20 steps of 32: what is left are 384 samples, 6 steps of 64."""
    begun, before = train({"schedule.use": "linear"}, until=until, batch=32, last=20)
    resumed: dict[str, Any] = {"until": until, "batch": 64, "resume": begun.run, "accept": "batch"}
    stopped, _ = train({"schedule.use": "linear"}, last=23, **resumed)
    ended, after = train({"schedule.use": "linear"}, **{**resumed, "accept": ()})
    assert (stopped.ending, ended.ending, ended.step, ended.state.num_samples) == ("stopped", "finished", 26, 1024)
    assert (begun.state.step, max(before.lrs), max(after.lrs)) == (20, 20, 26)
    assert after.lrs[24] == pytest.approx(1e-3 * (1 - 23 / 26))
    assert planned(ended.run)["spent"]["step"] == 20


def test_an_epoch_that_is_cut_otherwise_with_drop_last() -> None:
    """70 samples: 2 steps of 10, then 50 are left: 3 whole steps of 16; each epoch after it has 4."""
    settings = {"data.drop_last": True}
    begun, _ = train(settings, until="3ep", batch=10, last=2, dataset=data(70))
    ended, _ = train(settings, until="3ep", batch=16, dataset=data(70), resume=begun.run, accept="batch")
    assert (ended.step, ended.state.num_samples) == (2 + 3 + 4 + 4, 20 + 11 * 16)
    assert (ended.state.data.epoch, ended.state.data.position) == (2, 64)


class Stream(IterableDataset[Any]):
    def __init__(self, value: float) -> None:
        self.value = value

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.full((8,), self.value), 1)] * 400)


def test_a_stream_is_told_as_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    begun, _ = train({}, until="20steps", last=5, dataset=Stream(1.0))
    train({}, until="20steps", dataset=Stream(2.0), resume=begun.run, quiet=False)
    said = " ".join(capsys.readouterr().out.split())
    assert "data.train: sha256:" in said and "(safe): whether the data is the same is not known" in said


SCRIPT = """\
import sys
import torch
import trainwright as tw
from torch import nn

class Block(nn.Module):
    def forward(self, x):
        return torch.relu(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.block = nn.Linear(8, 2), Block()

    def forward(self, x):
        return self.block(self.fc(x))

class Data(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        return super().__getitem__(index)

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

class Stop:
    def observe(self, result, state):
        return tw.Stop("enough") if result.step == 5 else None
    def close(self): ...

data = Data(torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 2)
settings = {"device": "cpu", "precision": "fp32"}
result = tw.fit(Net(), data, loss, until="20steps", settings=settings, observers=[Stop()])
"""
GOES_ON = ("observers=[Stop()]", 'resume="runs/run"')


def script(*edits: tuple[str, str]) -> dict[str, Any]:
    """Runs SCRIPT as ``__main__`` with these edits in it."""
    text = SCRIPT
    for edit in edits:
        assert text.count(edit[0]) == 1
        text = text.replace(*edit)
    Path("script.py").write_text(text)
    return runpy.run_path("script.py", run_name="__main__")


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (("self.block(self.fc(x))", "-self.block(self.fc(x))"), "Net"),
        (("torch.relu(x)", "torch.tanh(x)"), "Block"),
        (("return nn.functional.cross_entropy(output", "return -nn.functional.cross_entropy(output"), "loss"),
        (("super().__getitem__(index)", "tuple(super().__getitem__(index))"), "Data"),
    ],
)
def test_what_was_edited_in_the_script_itself(edit: tuple[str, str], name: str) -> None:
    script()
    with pytest.raises(UsageError) as caught:
        script(GOES_ON, edit)
    assert f"(changes the maths): the source of __main__.{name} differs" in caught.value.message
    assert "accept=['code']" in caught.value.remedy
    result = script((GOES_ON[0], f'{GOES_ON[1]}, accept="code"'), edit)["result"]
    assert (result.ending, result.step) == ("finished", 20)


def test_the_rest_of_the_script_may_change(capsys: pytest.CaptureFixture[str]) -> None:
    script()
    result = script(GOES_ON, ("import sys\n", "import sys, os\nprint('a line more')\n"))["result"]
    assert (result.ending, result.step) == ("finished", 20)
    assert "code" not in capsys.readouterr().out


def invoke(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["trainwright", *arguments])
    done = CliRunner().invoke(app, list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_the_command_that_is_printed_beside_what_is_fatal_does_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = "model: {use: mlp, args: {sizes: [64, 8, 10]}}"
    Path("small.yaml").write_text(f"name: small\nuntil: 20steps\ndevice: cpu\n{model}\ndata: {{train: digits}}\n")
    assert invoke(monkeypatch, "train", "small.yaml")[0] == 0
    lr = "optimizer.lr=1e-4"
    bad = ("--set", "optimizer.use=sgd", "--set", lr, "--set=model.args.sizes=[64, 9, 10]", "--set", "until=40steps")
    code, said = invoke(monkeypatch, "resume", "runs/small", *bad)
    assert code == 2 and said.count("(fatal)") == 2
    command = shlex.split(said.rpartition("undo what is fatal, then: ")[2])
    assert command[1:] == shlex.split(f"resume runs/small --set {lr} --set until=40steps --accept optimizer.lr")
    code, said = invoke(monkeypatch, *command[1:])
    assert code == 0 and "resumed from" in said, said


def test_a_run_that_ended_before_its_first_checkpoint_begins_again_with_the_same_choices() -> None:
    """The run stops after step 3 and its checkpoint is deleted, as if the process had been killed there."""
    settings = {"precision": "auto", "log.doctor": False}
    begun, _ = train(settings, last=3, until="6steps")
    for checkpoint in checkpoints(begun.run / "checkpoints"):
        shutil.rmtree(checkpoint)
    plan = planned(begun.run)
    choice = "bf16" if plan["precision"] == "fp32" else "fp32"  # what this machine would not choose
    (begun.run / "plan.json").write_text(json.dumps({**plan, "precision": choice, "threads": 3}))
    again, watch = train(settings, until="6steps", resume=begun.run)
    assert (again.ending, again.step, min(watch.lrs)) == ("finished", 6, 1)
    assert (planned(begun.run)["precision"], planned(begun.run)["threads"]) == (choice, 3)
    (begun.run / "provenance.json").unlink()  # killed before it was laid down: nothing to go on from
    for checkpoint in checkpoints(begun.run / "checkpoints"):
        shutil.rmtree(checkpoint)
    with pytest.raises(CheckpointError, match="no checkpoint that verifies"):
        train(settings, until="6steps", resume=begun.run)
