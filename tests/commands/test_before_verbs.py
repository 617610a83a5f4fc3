"""``plan`` and ``graph`` on models and options of all kinds: a sentence and one JSON object, always."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trainwright.cli import app

ODD_NETS = """\
import sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.inner(x).relu())

class Prints(Net):
    def forward(self, x):
        print("here I am")
        return super().forward(x)

class Raises(Net):
    def forward(self, x):
        raise RuntimeError("my model is broken")

class Exits(Net):
    def forward(self, x):
        sys.exit(0)

class Detached(Net):
    def forward(self, x):
        return super().forward(x).detach()

class Wide(Net):
    def forward(self, x):
        return super().forward(x[:, :5])

class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.LazyLinear(2)

    def forward(self, x):
        return self.head(x)

def on_meta():
    with torch.device("meta"):
        return Net()

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(6), 1

def pairs(n=64):
    return [(torch.randn(6), i % 2) for i in range(n)]

class Named(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"left": torch.randn(3), "right": torch.randn(3), "label": index % 2}

class Two(Net):
    def forward(self, left, right):
        return super().forward(torch.cat([left, right], -1))

def named_loss(model, batch):
    return nn.functional.cross_entropy(model(batch["left"], batch["right"]), batch["label"])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("odd_nets", None)
    (tmp_path / "odd_nets.py").write_text(ODD_NETS)
    return tmp_path


def ask(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the one object of stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["trainwright", *arguments, "--json"])
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert "Traceback" not in done.output
    return done.exit_code, json.loads(done.stdout), done.stderr


def recipe(model: str, data: str = "pairs", loss: str = "cross_entropy", batch: str = "{size: 8}") -> str:
    text = f'until: 4steps\nmodel: {{use: "odd_nets:{model}"}}\ndata: {{train: {{use: "odd_nets:{data}"}}}}\n'
    Path("r.yaml").write_text(f'{text}loss: {{use: "{loss}"}}\nbatch: {batch}\n')
    return "r.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["plan", "graph"])
@pytest.mark.parametrize(
    ("model", "data", "loss"),
    [
        ("Net", "pairs", "cross_entropy"),
        ("Prints", "pairs", "cross_entropy"),
        ("Net", "Stream", "cross_entropy"),
        ("Two", "Named", "odd_nets:named_loss"),
    ],
)
def test_models_and_data_of_all_kinds(
    folder: Path, monkeypatch: pytest.MonkeyPatch, verb: str, model: str, data: str, loss: str
) -> None:
    on = ["--device", "rtx4090"] if verb == "plan" else []
    code, answer, message = ask(monkeypatch, verb, recipe(model, data, loss), *on)
    assert code == 0, message
    assert answer["parameters" if verb == "plan" else "modules"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("Raises", "my model is broken at "),
        ("Exits", "sys.exit(0)"),
        ("Detached", "no parameter"),
        ("Wide", "odd_nets.py"),
        ("Lazy", "nn.LazyLinear"),
        ("on_meta", "meta device"),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "graph"])
def test_a_model_that_cannot_be_planned(
    folder: Path, monkeypatch: pytest.MonkeyPatch, verb: str, model: str, message: str
) -> None:
    on = ["--device", "rtx4090"] if verb == "plan" else []
    code, answer, _ = ask(monkeypatch, verb, recipe(model), *on)
    assert code == answer["exit"] != 0
    assert message in answer["error"]
    assert "remedy" in answer["error"]


@pytest.mark.slow
def test_a_model_that_is_not_ready_is_no_puzzle_for_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for model, message in (("Lazy", "has no shape yet"), ("on_meta", "has no values")):
        for verb in ("train", "check"):
            code, answer, _ = ask(monkeypatch, verb, recipe(model))
            assert (code, answer["exit"]) == (2, 2)
            assert message in answer["error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--memory=-1"], "not a size of memory"),
        (["plan", "--memory=nan"], "not a size of memory"),
        (["plan", "--memory=0GiB"], "more than 0"),
        (["plan", "--device", "abacus"], "no device"),
        (["plan", "--devices", "none.yaml"], "cannot be read"),
        (["plan", "--devices", "odd_nets.py"], "YAML"),
        (["plan", "--set", "batch.micro=auto", "--set", "batch.accumulation=2"], "contradicts accumulation"),
        (["graph", "--svg", "none/x.svg"], "cannot be written"),
        (["graph", "--depth", "0"], "--depth"),
        (["graph", "--nonsense"], "nonsense"),
    ],
)
def test_wrong_options(folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    verb, *options = arguments
    code, answer, _ = ask(monkeypatch, verb, recipe("Net"), *options)
    assert code == answer["exit"] in (1, 2)
    assert message in answer["error"]


@pytest.mark.slow
def test_an_empty_dataset(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, answer, _ = ask(monkeypatch, "plan", recipe("Net"), "--set", "data.train.args={n: 0}")
    assert code == answer["exit"] != 0
    assert "the dataset is empty" in answer["error"]


@pytest.mark.slow
def test_a_check_that_is_cut_short_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, answer, message = ask(monkeypatch, "check", recipe("Raises"))
    assert (code, answer["trains"], answer["complete"]) == (3, False, False)
    assert "the rest was not checked" in message
