"""``trainwright init``: each kind is written, tested and trained by the commands of its own README."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import trainwright as tw
from tests.forked import COMMAND_LINE, Forked, run
from trainwright.cli import app
from trainwright.commands.init import KINDS, SCHEMA, TEMPLATES
from trainwright.errors import StorageError, UsageError
from trainwright.recipe import json_schema, load
from trainwright.watching.budget import DOCTOR_VARIABLE

WITH_SCRIPT = ("rl", "loop")
ALL = pytest.mark.parametrize("kind", KINDS)
WITH_RECIPE = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in WITH_SCRIPT])
SETTINGS = ("precision", "schedule", "optimizer.lr", "optimizer.weight_decay", "optimizer.clip.by", "batch.size")
"""Each recipe states what changes its result, also where that is the default."""


@dataclass(frozen=True)
class Score:
    """The last line of the training command: ``name`` and a number between ``least`` and ``most``."""

    name: str
    least: float
    most: float


SCORES = {
    "classification": Score("accuracy", 0.96, 1),
    "segmentation": Score("mean_iou", 0.85, 1),
    "language-model": Score("perplexity", 1, 11),  # pairs of characters give 14
    "table": Score("accuracy", 0.96, 1),
    "rl": Score("reward", 400, 500),
    "loop": Score("accuracy", 0.98, 1),
}

DIAGNOSED = ("language-model", "loop")
"""Kinds that are trained under the doctor. It takes longer than the training of the others."""
SHORTER = {"classification": "1ep", "segmentation": "1ep"}
"""Kinds that are trained for a part of their length, and so without the score of the whole."""


def execute(command: str, folder: Path) -> Forked:
    """Runs a command of a README as a shell in ``folder`` would, but for the time that importing torch takes."""
    program, *arguments = shlex.split(command)
    code = COMMAND_LINE
    if program == "python" and arguments[0] == "-m":
        code = f"import runpy; runpy.run_module({arguments.pop(1)!r}, run_name='__main__', alter_sys=True)"
        arguments = arguments[1:]
    elif program == "python":
        code = f"import runpy; runpy.run_path({arguments.pop(0)!r}, run_name='__main__')"
    doctor = {} if folder.name in DIAGNOSED else {DOCTOR_VARIABLE: "off"}
    shorter = {"TRAINWRIGHT_UNTIL": SHORTER[folder.name]} if folder.name in SHORTER else {}
    return run(code, *arguments, cwd=folder, env={"TRAINWRIGHT_EXAMINE": "budget", **doctor, **shorter})


@pytest.mark.examined
@pytest.mark.slow
@pytest.mark.process
@ALL
def test_the_commands_of_the_readme_test_train_and_use_it(kind: str, tmp_path: Path) -> None:
    project = tw.init(kind, tmp_path / kind)
    tests, training, use = (execute(command, project.folder) for command in project.commands)
    assert tests.returncode == 0 and re.search(r"[12] passed", tests.stdout), tests.stdout + tests.stderr
    assert training.returncode == 0, training.stdout + training.stderr
    assert kind not in DIAGNOSED or "diagnosis: nothing found" in training.stdout + training.stderr
    score = SCORES[kind]
    reached = re.findall(rf"{score.name} ([\d.]+)", training.stdout)
    assert score.least * (kind not in SHORTER) <= float(reached[-1]) <= score.most
    assert use.returncode == 0, use.stdout + use.stderr


@ALL
def test_each_kind_writes_its_files_and_a_readme_of_ten_lines_that_names_the_packages(
    kind: str, tmp_path: Path
) -> None:
    expected = {"README.md", "data.py", "model.py", "test_model.py"}
    expected |= {"train.py"} if kind in WITH_SCRIPT else {"recipe.yaml", SCHEMA}
    project = tw.init(kind, tmp_path / "deep" / kind)
    assert set(project.files) == {path.name for path in project.folder.iterdir()} == expected
    text = (project.folder / "README.md").read_text()
    assert len(text.splitlines()) == 10 and len(project.commands) == 3
    installs = set(text.split("pip install ")[1].split("`")[0].split())
    assert installs == {"scikit-learn" if module == "sklearn" else module for module in KINDS[kind]}


@WITH_RECIPE
def test_the_recipe_is_valid_and_states_its_settings(kind: str, tmp_path: Path) -> None:
    project = tw.init(kind, tmp_path / kind)
    file = project.folder / "recipe.yaml"
    loaded = load(file, environ={})
    assert loaded.recipe.name == kind
    assert [path for path in SETTINGS if not any(each.startswith(path) for each in loaded.stated)] == []
    assert file.read_text().startswith(f"# yaml-language-server: $schema={SCHEMA}\n")
    schema = json.loads((project.folder / SCHEMA).read_text())
    assert schema == json_schema() and set(yaml.safe_load(file.read_text())) <= set(schema["properties"])


def test_every_template_is_of_a_kind() -> None:
    assert {path.parent.name for path in TEMPLATES.glob("*/README.md")} == {kind.replace("-", "_") for kind in KINDS}


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("mine")
    for taken in (tmp_path, tmp_path / "model.py"):
        with pytest.raises(UsageError, match="exists already") as caught:
            tw.init("table", taken)
        assert caught.value.remedy == "name a new folder: trainwright init table FOLDER"
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert tw.init("loop", tmp_path).folder == tmp_path and (tmp_path / "train.py").is_file()


def test_an_unknown_kind_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="classification") as caught:
        tw.init("tabel", tmp_path / "new")
    assert "did you mean 'table'?" in caught.value.remedy and not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        tw.init("loop", tmp_path / "file" / "new")


def test_the_command_says_what_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainwright.commands.init.find_spec", lambda name: None if name == "sklearn" else name)
    done = CliRunner().invoke(app, ["init", "table"])
    assert done.exit_code == 0 and done.output.splitlines() == [
        f"table: README.md, data.py, model.py, {SCHEMA}, recipe.yaml, test_model.py",
        "next:",
        "  cd table",
        '  pip install "scikit-learn>=1.5"',
        "  python -m pytest",
        "  trainwright train recipe.yaml",
        "  trainwright evaluate runs/table",
    ]
    again = CliRunner().invoke(app, ["init", "table"])
    assert again.exit_code == 2
    written = json.loads(CliRunner().invoke(app, ["init", "loop", "other", "--json"]).output)
    assert (written["kind"], written["folder"], written["missing"]) == ("loop", "other", [])


def test_the_page_names_every_kind() -> None:
    page = (TEMPLATES.parent.parent / "docs/how-to/start-a-project.md").read_text()
    assert [kind for kind in KINDS if f"| `{kind}` |" not in page] == []
