"""Options of all commands: -h, --version, names of built-in recipes, and a pipe that closes early."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trainwright as tw
from trainwright.cli import app
from trainwright.cli.app import line_printer
from trainwright.doctor.pages import codes
from trainwright.recipe import load
from trainwright.recipe.load import builtin_recipes


def test_help_and_version() -> None:
    short, long = CliRunner().invoke(app, ["-h"]), CliRunner().invoke(app, ["--help"])
    assert short.exit_code == 0 and short.output == long.output
    assert CliRunner().invoke(app, ["train", "-h"]).exit_code == 0
    assert CliRunner().invoke(app, ["--version"]).output == f"trainwright {tw.__version__}\n"


@pytest.mark.slow
def test_explain_without_a_code_lists_all() -> None:
    listed = [line.split()[0] for line in CliRunner().invoke(app, ["explain"]).output.splitlines()]
    assert listed == list(codes())


def test_a_recipe_in_the_box_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load("gpt-tiny", environ={}).recipe == load(builtin_recipes() / "gpt-tiny.yaml", environ={}).recipe
    Path("gpt-tiny").write_text("model: torch.nn:Identity\ndata: {train: a:b}\nloss: a:c\nuntil: 3steps\n")
    assert load("gpt-tiny", environ={}).recipe.until.value == 3  # a file of that name comes first


def test_a_module_beside_the_recipe_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    (project / "beside_it.py").write_text("from torch import nn\ndef model():\n    return nn.Linear(2, 1)\n")
    (project / "r.yaml").write_text(
        "model: beside_it:model\ndata: {train: a:b}\nloss: torch.nn:MSELoss\nuntil: 1steps\n"
    )
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", [*sys.path])
    from trainwright.recipe.resolve import find

    loaded = load(project / "r.yaml", environ={})
    assert find("beside_it:model", {}, "model", loaded.source)().in_features == 2


@pytest.mark.process
def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "trainwright", "explain"], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert done.stderr == b""


def test_lines_are_printed_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    text = "data.jsonl:10:100: :smile: [bold]x[/bold]"
    line_printer(False)(text)
    assert capsys.readouterr().out == f"{text}\n"
