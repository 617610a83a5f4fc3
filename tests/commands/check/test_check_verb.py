"""The verb: one screen, one JSON object, an exit code; no file left, no later bit changed; all recipes in the box."""

from __future__ import annotations

import inspect
import json
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.training.small_recipes import SMALL
from trainwright.cli import app
from trainwright.commands.check.check import Budget, check
from trainwright.commands.check.verdict import WIDTH, Verdict, lines_of
from trainwright.doctor.pages import page
from trainwright.recipe import Loaded, load
from trainwright.training.run import train

RECIPES = Path(__file__).parents[3] / "recipes"
SHORT = Budget(read_s=60.0, range_s=60.0, one_batch_s=0.0, smoke_s=600.0, most_samples=256, smoke_steps=6)
"""Each part ends by its number of samples or steps, so that the load of the machine changes no verdict."""
ONE_LAYER = "model.args.layers=1"
SMALLER = {
    "demo": (ONE_LAYER, *(f"{part}.args.block_size=64" for part in ("model", "data.train", "data.val"))),
    "demo-digits": ("batch.size=8", "model.args.width=4"),
    "gpt-tiny": (ONE_LAYER,),
    "gpt-lora": (ONE_LAYER, "model.args.d_model=48", "batch.size=4"),
    "gpt2-124m": (ONE_LAYER, "model.args.vocab_size=512"),
    "hf-lora": ("model.args.n_layer=1", "model.args.n_embd=48"),
    "llama-7b": (ONE_LAYER, "model.args.vocab_size=512"),
    "resnet-digits": ("batch.size=8", "model.args.width=4"),
    "unet-shapes": ("batch.size=2", "model.args.width=4", "model.args.depth=2"),
}
RECIPE = """\
name: mine
until: 5steps
model: {use: mlp, args: {sizes: [8, 16, 3]}}
data: {train: {use: "mydata:samples"}, val: {use: "mydata:samples", args: {seed: 1}}}
batch: {size: 16}
"""
MYDATA = """\
import torch

def samples(seed=0, labels=3):
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(x, x[:, :3].argmax(1) * (labels // 3))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe and its data, which is the current one; temporary files go beside them."""
    (tmp_path / "here").mkdir()
    (tmp_path / "temporary").mkdir()
    (tmp_path / "here" / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "here" / "mydata.py").write_text(MYDATA)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.delitem(sys.modules, "mydata", raising=False)
    return tmp_path


@pytest.mark.slow
def test_a_healthy_recipe_passes_on_one_screen(place: Path) -> None:
    done = CliRunner().invoke(app, ["check", "recipe.yaml"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert 10 <= len(lines) <= 40 and all(len(line) <= WIDTH for line in lines[:-1])
    assert lines[-1].startswith("this would train (")


@pytest.mark.slow
def test_a_broken_one_exits_with_3_and_says_why(place: Path) -> None:
    settings = ["--set", "data.train.args={labels: 9}"]
    done = CliRunner().invoke(app, ["check", "recipe.yaml", "--json", *settings])
    assert done.exit_code == 3
    result = json.loads(done.stdout)
    assert result["exit"] == 3 and not result["trains"]
    failed = {each["what"]: each for each in result["verdicts"] if each["word"] == "fail"}
    assert "labels must be 0 to 2" in failed["labels"]["seen"] and failed["labels"]["remedy"]


def test_a_recipe_that_cannot_be_built_is_wrong_usage(place: Path) -> None:
    done = CliRunner().invoke(app, ["check", "recipe.yaml", "--set", "data.train.use=mydata:nothing"])
    assert done.exit_code == 2 and "data.train" in done.stderr and "remedy" in done.stderr


@pytest.mark.slow
def test_a_low_rate_is_no_fault_of_the_model_where_no_range_test_was_made(place: Path) -> None:
    """The batch is then learned at another rate than that of the recipe, which is too low for 200 steps."""
    loaded = load("recipe.yaml", overrides=["optimizer.lr=0.0003", "precision=fp32"])
    found = check(loaded, budget=Budget(read_s=0.3, range_s=0.0, one_batch_s=20.0, smoke_s=0.1, most_samples=64))
    [verdict] = [each for each in found.verdicts if each.what == "one batch"]
    assert verdict.word == "ok" and "lr 0.003" in verdict.seen


def files_in(place: Path) -> list[Path]:
    return [path for path in sorted(place.rglob("*")) if "__pycache__" not in path.parts]


@pytest.mark.slow
def test_it_leaves_no_file_behind_and_changes_no_bit_of_what_comes_later(place: Path) -> None:
    def trained(loaded: Loaded) -> dict[str, torch.Tensor]:
        state = train(loaded, quiet=True).state
        assert state is not None
        return state.model.state_dict()

    alone = trained(load("recipe.yaml"))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    before = files_in(place)
    settings = (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype())
    check(load("recipe.yaml"), budget=SHORT)
    assert torch.equal(torch.rand(3), expected)
    assert settings == (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype())
    assert files_in(place) == before
    after = trained(load("recipe.yaml"))
    assert alone.keys() == after.keys() and all(torch.equal(alone[name], after[name]) for name in alone)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_in_the_box_passes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINWRIGHT_EXAMINE")  # as for a user; planted faults are examined in full
    for package in {
        "hf-lora": ("transformers", "peft"),
        "demo-digits": ("sklearn",),
        "resnet-digits": ("sklearn",),
    }.get(path.stem, ()):
        pytest.importorskip(package)
    smaller = [*SMALL[path.name], *SMALLER.get(path.stem, ()), "device=cpu"]
    found = check(load(path, overrides=smaller), budget=replace(SHORT, range_s=0.0, smoke_steps=2))
    depends_on_load = [v for v in found.verdicts if v.what == "loading" or v.code == "resources.waits_for_data"]
    odd = [v.seen for v in found.verdicts if v.word in ("warn", "fail") and v not in depends_on_load]
    if path.stem.endswith("-lora"):  # they show the setting; the base model has random weights, and that is said
        assert all("random" in each for each in odd), odd
    else:
        assert odd == []
    (memory,) = (v for v in found.verdicts if v.what == "memory")
    assert memory.seen.startswith("a step peaks at"), "with LoRA, too, the step is traced"
    is_policy = path.stem == "reinforce-cartpole"  # the value of its loss need not fall
    assert is_policy == any("does not measure progress" in v.seen for v in found.verdicts)


def test_a_verdict_is_wrapped_with_its_remedy_below() -> None:
    verdict = Verdict("warn", "inputs", "not normalised " * 20, "subtract the mean")
    lines = lines_of(verdict)
    assert lines[0].startswith("warn  inputs") and all(len(line) <= WIDTH for line in lines)
    assert lines[-1].strip() == "-> subtract the mean"


def test_every_code_has_its_page() -> None:
    house = Path(inspect.getfile(check)).parent
    codes = {code for path in house.glob("*.py") for code in re.findall(r'"([a-z]+\.[a-z_]+)"', path.read_text())}
    assert len(codes) > 10
    for code in codes:
        assert page(code)
