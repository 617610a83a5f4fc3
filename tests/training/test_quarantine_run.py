"""Whole runs with samples in quarantine: the same bits after a resume, and words for whatever goes wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import trainwright as tw
from trainwright.checkpoint.train_state import TrainState
from trainwright.cli import app
from trainwright.engine.observer import Stop
from trainwright.engine.step import StepResult
from trainwright.recipe.load import load
from trainwright.runs.folder import RunFolder
from trainwright.runs.reader import read
from trainwright.runs.records import Quarantined, Step
from trainwright.training.run import train

pytestmark = pytest.mark.slow

FLAKY = """\
import random

import numpy as np
import torch

class Flaky(torch.utils.data.Dataset):
    epoch = -1

    def __init__(self, size=48, broken=(), healed_by=9999):
        self.size, self.broken, self.healed_by = size, broken, healed_by

    def __len__(self):
        return self.size

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        x = torch.linspace(0, index, 12) / 48 + 0.1 * torch.randn(12) + random.random() + float(np.random.rand())
        if index in self.broken and self.epoch < self.healed_by:
            raise OSError(f"cannot open image {index}")
        return x, index % 3


class Words(Flaky):
    def __getitem__(self, index):
        if index in self.broken:
            raise OSError(f"cannot open text {index}")
        return torch.full((6,), index), index % 3
"""
RECIPE = """\
name: run
until: 20steps
precision: fp32
model:
  use: mlp
  args: {sizes: [12, 24, 3], dropout: 0.2}
data:
  train: {use: "flaky:Flaky", args: {size: 48, broken: [5, 17, 18, 40], healed_by: 1}}
  on_bad_sample: quarantine
batch: {size: 8, micro: 4}
checkpoint: {every: 50steps}
log: {every: 1steps, doctor: false}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("flaky", None)
    (tmp_path / "flaky.py").write_text(FLAKY)
    (tmp_path / "run.yaml").write_text(RECIPE)
    return tmp_path


class StopAt:
    def __init__(self, step: int) -> None:
        self.step = step

    def observe(self, result: StepResult, state: TrainState) -> Stop | None:
        return Stop("test") if result.step == self.step else None

    def close(self) -> None: ...


def weights(run: Path) -> dict[str, bytes]:
    tensors = load_file(run / "checkpoints/step-00000020/model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def batches_of(run: Path) -> dict[int, str]:
    """The hash of the sample ids, by step."""
    return {r.step: r.ids_hash for r in read(run / "log.jsonl").records if isinstance(r, Step)}


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "at", "resumed_with"),
    [(0, 2, 0), pytest.param(2, 8, 0, marks=pytest.mark.process), pytest.param(0, 8, 2, marks=pytest.mark.process)],
)
def test_stopped_and_resumed_it_has_the_same_bits(workers: int, at: int, resumed_with: int) -> None:
    """The samples can be read again from the second epoch on: only a checkpoint that knows them keeps them out."""
    whole = train(load("run.yaml", overrides=["name=straight"]), quiet=True)
    assert whole.state is not None and whole.state.quarantine == {5, 17, 18, 40}
    first = train(load("run.yaml", overrides=[f"data.workers={workers}"]), quiet=True, extras=[lambda *_: StopAt(at)])
    assert first.ending == "stopped" and first.step == at
    second = train(
        load("run.yaml", overrides=[f"data.workers={resumed_with}"]), resume=RunFolder.open(first.run), quiet=True
    )
    assert second.step == 20 and second.state is not None
    assert second.state.quarantine == whole.state.quarantine
    assert second.state.num_samples == whole.state.num_samples
    assert batches_of(first.run) == batches_of(whole.run)
    assert weights(first.run) == weights(whole.run)
    for run in (whole.run, first.run):
        told = [r for r in read(run / "log.jsonl").records if isinstance(r, Quarantined)]
        assert sorted(r.sample_ids[0] for r in told) == [5, 17, 18, 40], "each is named once"
        assert all(len(r.sample_ids) == 1 and "OSError: cannot open image" in r.reason for r in told)


def test_what_a_recipe_puts_there_is_as_if_it_had_been_found() -> None:
    found = train(load("run.yaml", overrides=["name=found"]), quiet=True)
    broken = "data.train.args.broken=[]"
    named = train(load("run.yaml", overrides=["name=named", "data.quarantine=[40,5,17,18]", broken]), quiet=True)
    assert weights(found.run) == weights(named.run)
    assert batches_of(found.run) == batches_of(named.run)
    assert not [r for r in read(named.run / "log.jsonl").records if isinstance(r, Quarantined)]


def test_it_is_said_once_and_the_run_goes_on() -> None:
    code, said = invoke("train", "run.yaml")
    assert code == 0, said
    for sample in (5, 17, 18, 40):
        told = f"sample {sample} cannot be read and is left out from now on: OSError: cannot open image {sample}"
        assert said.count(told) == 1


def test_unasked_it_stops_and_the_remedy_works() -> None:
    settings = ["--set", "data.train.args.broken=[17]", "--set", "until=6steps"]
    code, said = invoke("train", "run.yaml", *settings, "--set", "data.on_bad_sample=stop")
    assert code == 1 and "cannot open image 17 for sample 17" in said and "data.quarantine: [i]" in said
    code, said = invoke(
        "train", "run.yaml", *settings, "--set", "data.on_bad_sample=stop", "--set", "data.quarantine=[17]"
    )
    assert code == 0, said


def test_positions_that_the_dataset_does_not_have(folder: Path) -> None:
    (folder / "run.yaml").write_text(RECIPE.replace("on_bad_sample: quarantine", "quarantine: [5, 48, 4021]"))
    code, said = invoke("train", "run.yaml")
    assert code == 2, said
    line = RECIPE.splitlines().index("  on_bad_sample: quarantine") + 1
    assert f"run.yaml:{line}" in said and "data.quarantine: must be positions in the training set, 0 to 47" in said
    assert "(got 48, 4021)" in said and "remedy" in said
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (f"data.quarantine={json.dumps(list(range(48)))}", "all 48 samples of the training set are in quarantine"),
        (f"data.train.args.broken={json.dumps(list(range(48)))}", "no sample is left to train on"),
    ],
)
def test_nothing_is_left_to_train_on(setting: str, expected: str) -> None:
    code, said = invoke("train", "run.yaml", "--set", setting)
    assert code == 1 and expected in said and "remedy" in said


def test_tokens_are_counted_though_the_first_samples_cannot_be_read() -> None:
    words = ["data.train.use=flaky:Words", "data.train.args={broken: [0, 1]}", "until=480tok"]
    model = ["model={use: 'flaky_model:Net'}", "loss.use=cross_entropy"]
    Path("flaky_model.py").write_text(
        "import torch\n\nclass Net(torch.nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(torch.nn.Embedding(48, 4), torch.nn.Flatten(), torch.nn.Linear(24, 3))\n"
    )
    sys.modules.pop("flaky_model", None)
    result = train(load("run.yaml", overrides=[*words, *model]), quiet=True)
    assert result.step == 10 and result.ending == "finished"  # 8 samples of 6 tokens a step


def test_fit_takes_it_too() -> None:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    x[3] = float("nan")
    settings: dict[str, Any] = {"data.quarantine": [3]}
    result = tw.fit(
        torch.nn.Linear(4, 1), (x, x[:, :1]), torch.nn.MSELoss(), until="2ep", settings=settings, batch=8, quiet=True
    )
    assert result.skipped == 0 and result.state is not None
    assert result.state.num_samples == 2 * 31
    with pytest.raises(tw.TrainwrightError, match="0 to 31"):
        tw.fit(torch.nn.Linear(4, 1), (x, x), torch.nn.MSELoss(), settings={"data.quarantine": [32]}, quiet=True)
