"""Instructions for coding agents: written into a project, never over somebody's text; and llms.txt of the docs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from typer.main import get_command

from trainwright.agent.install import AGENTS_PATH, SKILL_PATH, install, section, skill
from trainwright.cli import app
from trainwright.commands.replay.change import CHANGES
from trainwright.errors import StorageError, UsageError

ROOT = Path(__file__).parents[2]


def test_both_files_are_written_once(tmp_path: Path) -> None:
    (tmp_path / "AGENTS.md").write_text("# Ours\n\nUse tabs.\n")
    assert install(tmp_path).written == (str(SKILL_PATH), "AGENTS.md")
    text = (tmp_path / "AGENTS.md").read_text()
    assert text == f"# Ours\n\nUse tabs.\n\n{section()}"
    assert (tmp_path / SKILL_PATH).read_text() == skill()
    again = install(tmp_path)
    assert again.written == () and again.unchanged == (str(SKILL_PATH), "AGENTS.md")


@pytest.mark.parametrize("path", [SKILL_PATH, AGENTS_PATH], ids=str)
def test_edited_text_is_kept_unless_it_is_to_be_replaced(tmp_path: Path, path: Path) -> None:
    (tmp_path / "AGENTS.md").write_text("before\n")
    install(tmp_path)
    (tmp_path / "AGENTS.md").write_text((tmp_path / "AGENTS.md").read_text() + "after\n")
    edited = (tmp_path / path).read_text().replace("Before a run", "Edited")
    (tmp_path / path).write_text(edited)
    with pytest.raises(UsageError, match="another version"):
        install(tmp_path)
    assert (tmp_path / path).read_text() == edited
    assert install(tmp_path, replace=True).written == (str(path),)
    assert (tmp_path / "AGENTS.md").read_text() == f"before\n\n{section()}after\n"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (tmp_path / "other.md").write_text("other")
    (project / "AGENTS.md").symlink_to(tmp_path / "other.md")
    with pytest.raises(StorageError, match="symbolic link"):
        install(project)
    assert (tmp_path / "other.md").read_text() == "other"
    with pytest.raises(UsageError, match="is not a folder"):
        install(tmp_path / "nothing")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_linked_folder_is_not_followed(tmp_path: Path, depth: int) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    linked = project.joinpath(*SKILL_PATH.parts[:depth])
    linked.parent.mkdir(parents=True, exist_ok=True)
    linked.symlink_to(elsewhere)
    with pytest.raises(StorageError, match="symbolic link"):
        install(project)
    assert [*elsewhere.iterdir()] == [] and not (project / "AGENTS.md").exists()
    (tmp_path / "name").symlink_to(tmp_path / "other")
    (tmp_path / "other").mkdir()
    assert install(tmp_path / "name").written, "the project itself may be a link"


def test_the_skill_names_commands_and_changes_that_exist() -> None:
    head = skill().split("---\n")[1]
    assert re.search("^name: trainwright$", head, re.MULTILINE) and "description: " in head
    commands = get_command(app).commands  # type: ignore[attr-defined]
    named = set(re.findall(r"`trainwright ([a-z-]+)", skill()))
    assert named and named <= set(commands)
    line = next(each for each in skill().splitlines() if "changes: `lr" in each)
    assert {re.split("[=` ]", each)[0] for each in re.findall(r"`([a-z]+=?[^`]*)`", line)} <= set(CHANGES)


def test_llms_txt_is_what_the_script_prints() -> None:
    assert (ROOT / "docs/llms.txt").read_text() == runpy.run_path(str(ROOT / "scripts/llms.py"))["text"]()
