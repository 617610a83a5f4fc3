"""A run writes no credential into its folder and prints none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainwright.cli import app

CODE = """
import torch
from torch.utils.data import TensorDataset
def model(): return torch.nn.Linear(2, 2)
def data(url, token, seen=[]):
    assert token == "hunter2" and url == "https://me:hunter2@host/data"
    return TensorDataset(torch.randn(8, 2), torch.arange(8) % 2)
class Loss(torch.nn.CrossEntropyLoss):
    steps = 0
    def forward(self, output, target):
        Loss.steps += 1
        if Loss.steps == FAILS_AT:
            raise ConnectionError("cannot reach https://me:hunter2@host/data?token=hunter2")
        return super().forward(output, target)
"""
RECIPE = """
name: theirs
until: 2steps
precision: fp32
model: code_with_login:model
data: {train: {use: code_with_login:data, args: {url: "https://me:hunter2@host/data"}}}
loss: code_with_login:Loss
batch: {size: 4}
log: {sinks: [csv, tensorboard]}
"""
TOKEN = ("--set", "data.train.args.token=hunter2")
URL = ("--set", "data.train.args.url=https://me:hunter2@host/data")


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("code_with_login.py").write_text(CODE.replace("FAILS_AT", "None"))
    Path("recipe.yaml").write_text(RECIPE)
    return tmp_path


def invoke(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    sys.modules.pop("code_with_login", None)
    monkeypatch.setattr(sys, "argv", ["trainwright", *words])
    done = CliRunner().invoke(app, list(words))
    assert "hunter2" not in done.output, done.output
    return done.exit_code, done.output


def holding(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes())


@pytest.mark.examined
@pytest.mark.slow
def test_a_run_keeps_no_secrets_and_asks_for_them_again(shown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke(monkeypatch, "train", "recipe.yaml", *TOKEN)[0] == 0
    assert holding(Path("runs")) == []
    for words in (("report", "runs/theirs"), ("diagnose", "runs/theirs"), ("compare", "runs/theirs", "runs/theirs")):
        assert invoke(monkeypatch, *words)[0] == 0
    assert "&lt;masked&gt;" in Path("runs/theirs/report.html").read_text()

    more = ("--set", "until=3steps")
    code, said = invoke(monkeypatch, "resume", "runs/theirs", *more)
    assert code == 2 and "runs/theirs/recipe.yaml:" in said
    for path in ("data.train.args.token", "data.train.args.url"):
        assert f"{path}: is a secret" in said and f"--set {path}=..." in said
    code, said = invoke(monkeypatch, "resume", "runs/theirs", *more, *TOKEN, *URL)
    assert code == 0, said
    assert holding(Path("runs")) == []


@pytest.mark.slow
def test_a_failure_shows_no_secrets(shown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("code_with_login.py").write_text(CODE.replace("FAILS_AT", "40"))
    code, said = invoke(monkeypatch, "train", "recipe.yaml", *TOKEN, "--set", "until=100steps")
    assert code == 1 and "cannot reach https://<masked>@host/data?token=<masked>" in said
    assert (Path("runs/theirs/error.txt")).is_file() and holding(Path("runs")) == []


def test_what_is_wrong_with_a_secret_is_said_without_it(shown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["model.hf_token=hunter2", "name.password=hunter2", "data.train.args.token={hunter2"]
    settings += ["alerts.webhook=https://chat.example.com/hooks/hunter2", "alerts.apprise=tgram://hunter2/1"]
    for setting in settings:
        code, said = invoke(monkeypatch, "plan", "recipe.yaml", "--set", setting)
        assert code == 2 and "remedy" in said
    Path("recipe.yaml").write_text(f"{RECIPE}\ntoken: hunter2: x\n")
    assert invoke(monkeypatch, "plan", "recipe.yaml")[0] == 2
