"""All faults of a recipe beyond its schema are reported at once, each with its place and the nearest name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import trainwright as tw
from trainwright.cli import app
from trainwright.errors import Problems, RecipeError
from trainwright.recipe import load
from trainwright.recipe.resolve import require_arguments
from trainwright.recipe.source import Source
from trainwright.training.problems import problems_of

MINE = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed, self.body = nn.Linear(20, width), nn.Linear(width, 3)

    def forward(self, x):
        return self.body(self.embed(x).relu())


class Reads(Net):
    def __init__(self, width=8):
        super().__init__(width)
        float(self.embed.weight.sum())  # cannot be built without memory


def samples(count=64):
    return torch.utils.data.TensorDataset(torch.randn(count, 20), torch.arange(count) % 3)
"""
RECIPE = """\
until: 8steps
device: cpu
model:
  use: "mine:Net"
  args: {width: 8}
data:
  train: {use: "mine:samples"}
  val: {use: "mine:samples"}
batch: {size: 8}
optimizer:
  use: adamw
schedule:
  use: cosine
"""
Edits = list[tuple[str, str]]
Expected = dict[str, tuple[int, str]]
"""By the path of a problem: its line, and what its remedy says."""

NAMES: tuple[Edits, Expected] = (
    [
        ('use: "mine:Net"', 'use: "mine:Nett"'),
        ('train: {use: "mine:samples"}', 'train: {use: "mine:sample"}'),
        ('val: {use: "mine:samples"}', "val: {use: text-file, args: {path: recipe.yml}}"),
        ("batch:", 'loss: "minee:loss"\nbatch:'),
        ("use: adamw", "use: adamw\n  args: {epss: 1}"),
        ("use: cosine", "use: polynomial\n  args: {powr: 1}"),
    ],
    {
        "model.use": (4, "'Net'"),
        "data.train.use": (7, "'samples'"),
        "data.val.args": (8, "recipe.yaml"),
        "loss.use": (9, "'mine'"),
        "optimizer.args.epss": (13, "'eps'"),
        "schedule.args.powr": (16, "'power'"),
    },
)
VALUES: tuple[Edits, Expected] = (
    [
        ('use: "mine:Net"', 'use: "mine:Net"\n  freeze: ["embd.*", "body.*", "boddy.*"]'),
        ("use: adamw", "use: adamw\n  args: {betas: [2.0, 0.9]}\n  groups: [{match: 'hed.*'}]"),
        ("batch:", "evaluation: {every: 3tok}\ncheckpoint: {every: 3tok}\nbatch:"),
    ],
    {
        "model.freeze.0": (5, "'embed.bias'"),
        "model.freeze.2": (5, "'body.bias'"),
        "evaluation.every": (10, "steps, epochs or samples"),
        "checkpoint.every": (11, "steps, epochs or samples"),
        "optimizer": (13, "change the argument"),
        "optimizer.groups.0.match": (16, "glob"),
    },
)
COMPONENTS: tuple[Edits, Expected] = (
    [
        ("args: {width: 8}", "args: {widht: 8}"),
        (
            'train: {use: "mine:samples"}',
            'train: {use: "mine:samples"}\n  more_val: [{name: more, use: "mine:smples"}]',
        ),
        ("batch: {size: 8}", "batch: {size: 8, micro: 4, accumulation: 3}"),
        (
            "use: cosine",
            "use: cosine\nmetrics: ['mine:Nte']\nobservers: ['mine:sampels']\nspikes: {policy: 'mine:Redas'}",
        ),
    ],
    {
        "model.args.widht": (5, "'width'"),
        "data.more_val.0.use": (8, "'samples'"),
        "batch": (10, "leave accumulation out (it would be 2)"),
        "metrics.0.use": (15, "'Net'"),
        "observers.0.use": (16, "'samples'"),
        "spikes.policy.use": (17, "'Reads'"),
    },
)
PACKAGES: tuple[Edits, Expected] = (
    [
        ("use: adamw", "use: torch.optim:NAdam\n  args: {momentun_decay: 0.1}"),
        ("use: cosine", "use: torch.optim.lr_scheduler:StepLR\n  args: {step_sze: 3}"),
    ],
    {"optimizer.args.momentun_decay": (12, "'momentum_decay'"), "schedule.args.step_sze": (15, "'step_size'")},
)
ASKED = pytest.mark.parametrize(
    "asked",
    [NAMES, VALUES, COMPONENTS, PACKAGES],
    ids=["names and files", "patterns, values and durations", "arguments, components and batch", "packages"],
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def write(folder: Path, edits: Edits) -> None:
    text = RECIPE
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    (folder / "recipe.yaml").write_text(text)


def said_by(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 2, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.output


@ASKED
def test_all_problems_with_their_places_and_nearest_names(folder: Path, asked: tuple[Edits, Expected]) -> None:
    edits, expected = asked
    write(folder, edits)
    found = problems_of(load("recipe.yaml"))
    assert [each.path for each in found] == list(expected), "in the order of the file, each once"
    for problem, (line, remedy) in zip(found, expected.values(), strict=True):
        assert problem.where == f"recipe.yaml:{line}" and remedy in problem.remedy, problem


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "asked"), [("train", NAMES), ("check", VALUES), ("plan", COMPONENTS), ("graph", PACKAGES)]
)
def test_every_verb_says_all_of_them(folder: Path, verb: str, asked: tuple[Edits, Expected]) -> None:
    edits, expected = asked
    write(folder, edits)
    said = said_by(verb, "recipe.yaml")
    for path, (line, _) in expected.items():
        assert f"recipe.yaml:{line}: {path}: " in said, said


def test_a_healthy_recipe_has_none_and_moves_no_generator(folder: Path) -> None:
    write(folder, [])
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert problems_of(load("recipe.yaml")) == []
    assert torch.equal(torch.rand(2), expected)


def test_metrics_in_the_box_are_known_with_their_arguments(folder: Path) -> None:
    write(folder, [("batch:", "metrics: [accuracy, {use: top_k, args: {n: 3}}]\nbatch:")])
    [problem] = problems_of(load("recipe.yaml"))
    assert problem.path == "metrics.1.args.n" and "it accepts: k, ignore_index" in problem.remedy


def test_a_model_that_cannot_be_built_without_memory_is_no_problem(folder: Path) -> None:
    write(folder, [('use: "mine:Net"', 'use: "mine:Reads"')])
    assert problems_of(load("recipe.yaml")) == []


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), "nowhere:loss"], ids=["live", "unknown"])
def test_live_objects_are_examined_too(loss: nn.Module | str, tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(32, 4)
    settings = {"model.freeze": ["9.*"], "optimizer.groups": [{"match": "head.*"}], "folder": str(tmp_path)}
    with pytest.raises(RecipeError) as caught:
        tw.fit(
            model,
            (x, torch.zeros(32, dtype=torch.int64)),
            loss,
            until="2steps",
            batch=10,
            accumulation=2,
            optimizer="collections:nothing",
            settings=settings | {"batch.micro": 4},
        )
    paths = {each.path for each in caught.value.problems}
    others = {"model.freeze.0", "optimizer.use", "optimizer.groups.0.match", "batch"}
    assert paths == (others | {"loss.use"} if isinstance(loss, str) else others)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("args", "paths", "words"),
    [
        ({"widht": 1}, ["model.args.widht"], ["did you mean 'width'?"]),
        ({"widht": 1, "colour": 2}, ["model.args.widht", "model.args.colour"], ["'width'", "it accepts: width, depth"]),
        ({}, ["model.use"], ["add model.args.width"]),
        ({"depth": 2}, ["model.args"], ["add model.args.width"]),
        ({"width": 2}, [], []),
    ],
)
def test_all_arguments_of_a_callable(args: dict[str, Any], paths: list[str], words: list[str]) -> None:
    def net(width: int, depth: int = 1) -> None: ...

    def any_net(**options: int) -> None: ...

    collected, of_any = Problems(), Problems()
    with collected.at("model"):
        require_arguments(net, args, "mine:net", "model", Source("recipe.yaml"))
    with of_any.at("model"):
        require_arguments(any_net, args, "mine:net", "model", Source("recipe.yaml"))
    assert [each.path for each in collected.found] == paths and of_any.found == []
    for problem, word in zip(collected.found, words, strict=True):
        assert word in problem.remedy


KUBERNETES = ["kubernetes", "recipe.yaml", "--ranks", "1x2", "--image", "i", "--volume", "v"]
SLURM = ["slurm", "recipe.yaml", "--ranks", "1x2"]


SLICES = [("batch: {size: 8}", "batch: {size: 8}\nparallel: {exact: true}")]


@pytest.mark.parametrize(
    ("words", "edits", "expected"),
    [
        (KUBERNETES, NAMES[0], ["model.use", "data.train.use", "optimizer.args.epss", "schedule.args.powr"]),
        (SLURM, SLICES, ["batch.micro"]),
        (KUBERNETES, SLICES, ["batch.micro"]),
    ],
    ids=["kubernetes, names", "slurm, slices", "kubernetes, slices"],
)
def test_no_job_is_written_that_the_ranks_refuse(
    folder: Path, words: list[str], edits: Edits, expected: list[str]
) -> None:
    """A container may have modules and data that this machine lacks: ``loss`` and the file of ``data.val``."""
    write(folder, edits)
    said = said_by("launch", *words, "--output", "job")
    assert [line.split(": ")[1] for line in said.splitlines() if line.startswith("  recipe.yaml:")] == expected, said
    assert not (folder / "job").exists()


@ASKED
def test_a_job_for_slurm_is_refused_as_its_ranks_refuse_it(folder: Path, asked: tuple[Edits, Expected]) -> None:
    write(folder, asked[0])
    one_rank = ["slurm", "recipe.yaml", "--ranks", "1", "--output", "job"]
    assert said_by("launch", *one_rank) == said_by("train", "recipe.yaml")
    assert not (folder / "job").exists()


@pytest.mark.parametrize("words", [SLURM, KUBERNETES], ids=["slurm", "kubernetes"])
def test_settings_of_a_job_are_part_of_its_recipe(folder: Path, words: list[str]) -> None:
    write(folder, [])
    settings = ["--set", "optimizer.args.epss=1", "--set", "batch.micro=2", "--set", "batch.accumulation=3"]
    said = said_by("launch", *words, *settings)
    assert "did you mean 'eps'?" in said and "(it would be 2)" in said, said


def test_a_missing_module_of_the_user_is_not_to_be_installed_by_its_name(folder: Path) -> None:
    write(folder, [('train: {use: "mine:samples"}', 'train: {use: "theirs:samples"}')])
    said = said_by("train", "recipe.yaml")
    assert "run it in the folder that has theirs.py" in said and "pip install" not in said


def test_what_only_the_container_has_is_left_to_it(folder: Path) -> None:
    write(folder, [('train: {use: "mine:samples"}', 'train: {use: "theirs:samples"}')])
    done = CliRunner().invoke(app, ["launch", *KUBERNETES])
    assert done.exit_code == 0, done.output
    assert "there is no module 'theirs'" in said_by("launch", *SLURM)
