"""An error of a user has a place, a rule, a remedy and an exit code, and no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainwright.cli import app

GOOD = """\
until: 3steps
model:
  use: mlp
  args: {sizes: [20, 16, 3]}
data:
  train: {use: "mine:samples"}
batch: {size: 8}
"""

MINE = """\
import torch
from torch import nn


class Samples(torch.utils.data.Dataset):
    def __init__(self, count=64, classes=3, broken=-1, ragged=-1, nan=-1):
        self.count, self.classes, self.broken, self.ragged, self.nan = count, classes, broken, ragged, nan

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.broken:
            raise OSError("image file is truncated")
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(21 if index == self.ragged else 20, generator=generator)
        return x, index % self.classes


def samples(**options):
    return Samples(**options)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([])


def fails(**options):
    raise RuntimeError("no such bucket")


def not_a_model():
    return {"weights": 1}


def detached(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).detach(), batch[1])


not_callable = 3
"""

# name: (edits of GOOD as (old, new), exit code, what must be said)
BROKEN: dict[str, tuple[list[tuple[str, str]], int, list[str]]] = {
    "wrong type": ([("until: 3steps", "until: 3steps\nseed: many")], 2, ["recipe.yaml:2", "seed", "whole number"]),
    "contradictory durations": (
        [("until:", "schedule: {warmup: 5steps}\nuntil:")],
        2,
        ["recipe.yaml:1", "warmup", "5steps"],
    ),
    "warm-up in epochs beyond the end": (
        [("until:", "schedule: {warmup: 2ep}\nuntil:")],
        2,
        ["recipe.yaml:1", "schedule.warmup", "16 steps", "remedy"],
    ),
    "tokens without tokens": ([("3steps", "3Mtok")], 2, ["recipe.yaml:1", "until", "tokens"]),
    "model that cannot be called": ([("use: mlp", "use: mine:not_callable")], 2, ["recipe.yaml:3", "called"]),
    "model that is no module": (
        [("use: mlp\n  args: {sizes: [20, 16, 3]}", "use: mine:not_a_model")],
        2,
        ["recipe.yaml:3", "nn.Module", "dict"],
    ),
    "builtin without a signature": (
        [("use: mlp\n  args: {sizes: [20, 16, 3]}", "use: time:sleep")],
        2,
        ["recipe.yaml:3", "sleep() takes exactly one argument (0 given) (got"],
    ),
    "loss without a signature": ([("until:", "loss: time:sleep\nuntil:")], 1, ["sleep() takes exactly one", "remedy"]),
    "bad model argument value": ([("[20, 16, 3]", "[20]")], 2, ["recipe.yaml:4", "sizes", "remedy"]),
    "dataset that cannot be built": ([("mine:samples", "mine:fails")], 2, ["recipe.yaml:6", "no such bucket"]),
    "empty dataset": ([('"mine:samples"', '"mine:samples", args: {count: 0}')], 2, ["recipe.yaml:6", "empty"]),
    "empty stream": ([("mine:samples", "mine:Stream")], 1, ["no batch", "remedy"]),
    "epoch without a step": (
        [('"mine:samples"}', '"mine:samples", args: {count: 4}}\n  drop_last: true')],
        2,
        ["recipe.yaml:7", "drop_last", "4 samples"],
    ),
    "no dataset at all": ([("mine:samples", "mine:not_a_model")], 2, ["recipe.yaml:6", "dict", "dataset"]),
    "dataset that raises": (
        [('"mine:samples"', '"mine:samples", args: {broken: 5}'), ("3steps", "2ep")],
        1,
        ["sample 5", "image file is truncated", "remedy"],
    ),
    "samples of two shapes": (
        [('"mine:samples"', '"mine:samples", args: {ragged: 5}'), ("3steps", "2ep")],
        1,
        ["5", "collating", "remedy"],
    ),
    "label out of range": ([("20, 16, 3", "20, 16, 2")], 1, ["label 2", "samples [", "0..1", "remedy"]),
    "shapes that do not fit": ([("20, 16, 3", "7, 16, 3")], 2, ["mat1 and mat2", "in_features=7", "remedy"]),
    "loss without a graph": ([("until:", "loss: mine:detached\nuntil:")], 2, ["gradient", ".detach()", "remedy"]),
    "everything frozen": ([("  args: {sizes", "  freeze: ['*']\n  args: {sizes")], 2, [":4", "nothing is left"]),
    "no blocks to recompute": (
        [
            ("use: mlp", "use: torch.nn:Linear\n  activation_checkpointing: block"),
            ("sizes: [20, 16, 3]", "in_features: 20, out_features: 3"),
        ],
        2,
        ["recipe.yaml:4", "blocks"],
    ),
    "a device that is not there": ([("until:", "device: cuda\nuntil:")], 2, ["recipe.yaml:1", "cuda", "remedy"]),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("mine", None)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def train(folder: Path, text: str, *options: str) -> tuple[int, str]:
    (folder / "recipe.yaml").write_text(text)
    done = CliRunner().invoke(app, ["train", "recipe.yaml", *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.mark.examined
@pytest.mark.process
def test_the_good_one_trains(folder: Path) -> None:
    code, said = train(folder, GOOD)
    assert code == 0, said
    assert "verdict" in said


@pytest.mark.process
@pytest.mark.parametrize("name", BROKEN)
def test_broken(folder: Path, name: str) -> None:
    edits, expected, fragments = BROKEN[name]
    text = GOOD
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    code, said = train(folder, text)
    assert code == expected, said
    assert "Traceback" not in said
    for fragment in fragments:
        assert fragment in said, f"{fragment!r} is not said:\n{said}"


def test_all_problems_at_once(folder: Path) -> None:
    text = GOOD.replace("size: 8", "size: 0").replace("use: mlp", "use: mpl") + "sede: 3\nprecision: fp64\n"
    code, said = train(folder, text)
    assert code == 2
    assert all(place in said for place in ("recipe.yaml:3", "recipe.yaml:7", "recipe.yaml:8", "recipe.yaml:9"))


@pytest.mark.process
def test_json_tells_the_error_too(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(GOOD.replace("3steps", "3"))
    command = [sys.executable, "-m", "trainwright", "train", "recipe.yaml", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert json.loads(done.stdout.splitlines()[-1])["exit"] == 2
    assert "Traceback" not in done.stderr
    assert "recipe.yaml:1" in done.stderr


def test_wrong_options_are_exit_2() -> None:
    assert CliRunner().invoke(app, ["train"]).exit_code == 2
    assert CliRunner().invoke(app, ["trian", "x"]).exit_code == 2
    assert CliRunner().invoke(app, ["demo", "--task", "poetry"]).exit_code == 2


def test_resume_of_nothing(folder: Path) -> None:
    done = CliRunner().invoke(app, ["resume", "runs/none"])
    assert done.exit_code == 2
    assert "runs/none" in done.output
