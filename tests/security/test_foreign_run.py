"""The list of SECURITY.md: what may be done with a run folder of somebody else, and what runs its code."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from tests.report_pages.runs import add, found
from tests.report_pages.serving import site_of
from trainwright.cli import app
from trainwright.runs.folder import RunFolder

PAGE = Path(__file__).parents[2] / "SECURITY.md"
THEIRS = """
from pathlib import Path
Path({mark!r}).write_text("their code ran")
import torch
def model(): return torch.nn.Linear(2, 2)
def data(): return torch.utils.data.TensorDataset(torch.randn(8, 2), torch.arange(8) % 2)
"""
RECIPE = """
name: theirs
until: 2steps
precision: fp32
model: their_code:model
data: {train: their_code:data}
loss: torch.nn:CrossEntropyLoss
batch: {size: 4}
"""
Invoke = Callable[..., Result]


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that their code makes when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    mark = tmp_path / "ran"
    Path("their_code.py").write_text(THEIRS.format(mark=str(mark)))
    Path("recipe.yaml").write_text(RECIPE)
    return mark


def invoke(*words: str) -> Result:
    sys.modules.pop("their_code", None)  # as in a process of its own
    return CliRunner().invoke(app, list(words))


SAFE = {
    "diagnose": ("diagnose", "runs/theirs"),
    "checks": ("checks", "runs/theirs"),
    "runs": ("runs", "runs"),
    "evidence": ("evidence", "runs/theirs"),
    "report": ("report", "runs/theirs"),
    "compare": ("compare", "runs/theirs", "runs/theirs"),
    "verify checkpoint": ("verify", "checkpoint", "runs/theirs"),
    "export": ("export", "runs/theirs"),
    "explain": ("explain", "gradient.spike"),
}
WITHOUT_A_RECIPE = {"agent install", "demo", "env", "init", "schema", "version"}
"""Commands that read no recipe and no run."""


def commands(group: Any, before: str = "") -> Iterator[str]:
    for name, each in group.commands.items():
        yield from commands(each, f"{before}{name} ") if hasattr(each, "commands") else [f"{before}{name}"]


def test_each_command_runs_their_code_or_is_safe() -> None:
    running, safe = PAGE.read_text().split("## What is safe")
    first = [line.split("|")[1] for line in running.splitlines() if line.startswith("| `")]
    runs = {name for cell in first for name in re.findall(r"`trainwright ([a-z -]+?)(?: --[a-z ]+)?`", cell)}
    listed = set(re.findall(r"^\| `trainwright ([a-z ]+?) [A-Z]+` \|", safe, re.MULTILINE))
    assert listed == {*SAFE, "serve"}
    assert runs & listed == {"export"}, "by what it is asked for"
    assert runs | listed | WITHOUT_A_RECIPE == set(commands(get_command(app)))


@pytest.mark.slow
def test_only_what_trains_or_builds_runs_their_code(mark: Path) -> None:
    assert invoke("train", "recipe.yaml", "--set", "checkpoint.every=1steps").exit_code == 0
    assert mark.exists()
    mark.unlink()
    add(RunFolder(Path("runs/theirs")), [replace(found("gradient.spike", 1), severity="warning")])  # for evidence
    for words in SAFE.values():
        done = invoke(*words)
        assert done.exit_code == 0, (words, done.output)
        assert not mark.exists(), words
    with site_of(Path("runs")) as site:
        assert "theirs" in site.ask("/view?run=theirs").text and site.ask("/data?run=theirs").status == 200
    assert not mark.exists()
    for words in (
        ("resume", "runs/theirs", "--set", "until=3steps"),
        ("evaluate", "runs/theirs", "train"),
        ("export", "runs/theirs", "--format", "hf"),  # which is refused, for it is no such model
    ):
        invoke(*words)
        assert mark.exists(), words
        mark.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("words", [("train", "recipe.yaml"), ("resume", "runs/theirs", "--set", "until=3steps")])
def test_what_is_not_allowed_is_refused_before_it_is_imported(mark: Path, words: tuple[str, ...]) -> None:
    if words[0] == "resume":
        assert invoke("train", "recipe.yaml").exit_code == 0
        mark.unlink()
    refused = invoke(*words, "--allow", "torch.nn", "--allow", "their", "--allow", "their_code.part")
    assert refused.exit_code == 2 and not mark.exists()
    assert refused.output.count("their_code is not allowed") == 2  # the model and the data, with their lines
    assert "recipe.yaml:" in refused.output and "torch.nn is not" not in refused.output
    assert invoke(*words, "--allow", "torch.nn", "--allow", "their_code").exit_code == 0 and mark.exists()


def test_every_callable_of_a_recipe_counts(mark: Path) -> None:
    """Also those that are named elsewhere than under ``use``."""
    Path("recipe.yaml").write_text(RECIPE + "spikes: {policy: os:getcwd}\noptimizer: {use: subprocess:run}\n")
    refused = invoke("train", "recipe.yaml", "--allow", "torch.nn", "--allow", "their_code")
    assert refused.exit_code == 2 and not mark.exists()
    assert "os is not allowed" in refused.output and "subprocess is not allowed" in refused.output
