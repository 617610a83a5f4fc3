"""Run folders: unique, found again, written whole or not at all."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.disks import small_disk
from trainwright.errors import StorageError, UsageError
from trainwright.runs.folder import RunFolder, runs_in
from trainwright.runs.records import Evidence


def make_run(root: Path, name: str) -> RunFolder:
    run = RunFolder.create(root, name)
    run.write_text("recipe.yaml", "name: x\n")
    run.write_text("plan.json", "{}")
    return run


def test_create_never_gives_the_same_folder_twice(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "runs"
    assert [RunFolder.create(root, "gpt").name for _ in range(2)] == ["gpt", "gpt-2"]
    (root / "gpt-3").touch()  # a file is in the way, too
    assert RunFolder.create(root, "gpt").name == "gpt-4"


@pytest.mark.process
def test_processes_at_once_get_a_folder_each(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom trainwright.runs.folder import RunFolder\nsys.stdin.read()\n"
        "for _ in range(20): print(RunFolder.create(sys.argv[1], 'run').name)"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.close()
    names: list[str] = []
    for racer in racers:
        assert racer.stdout is not None
        names += racer.stdout.read().split()
        racer.stdout.close()
        racer.wait()
    assert len(names) == len(set(names)) == 60


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0b"])
def test_a_name_that_is_no_folder_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a run folder"):
        RunFolder.create(tmp_path, name)


def test_create_under_a_file_and_with_a_name_too_long(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file is in the way"):
        RunFolder.create(tmp_path / "file", "run")
    with pytest.raises(StorageError, match="a part of the path is a file"):
        RunFolder.create(tmp_path / "file" / "deeper", "run")
    with pytest.raises(StorageError, match="name is too long"):
        RunFolder.create(tmp_path, "n" * 300)


def test_a_recipe_in_the_project_makes_it_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.yaml").write_text("until: 1steps")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        RunFolder.open("nope")
    assert caught.value.remedy == "give a run folder: runs/<name>"
    with pytest.raises(UsageError, match="holds no run"):
        RunFolder.open(".")
    assert runs_in(tmp_path.parent) == []


def test_a_run_that_has_only_just_begun_is_one(tmp_path: Path) -> None:
    for name in ("recipe.yaml", "lock"):
        (tmp_path / name).touch()
    assert RunFolder.open(tmp_path).path == tmp_path


def test_the_current_folder_is_suggested_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, "gpt-tiny")
    monkeypatch.chdir(run.path)
    with pytest.raises(UsageError) as caught:
        RunFolder.open("nope")
    assert caught.value.remedy == f"did you mean {run.path.resolve()}?"


def test_open_suggests_what_may_be_meant(tmp_path: Path) -> None:
    run = make_run(tmp_path, "gpt-tiny")
    make_run(tmp_path, "resnet")
    (tmp_path / "gpt-tin").mkdir()
    assert RunFolder.open(run.path) == run
    wrongs = {
        "gpt-tiney": "does not exist",
        "gpt-tin": "holds no run",
        "gpt-tiny/recipe.yaml": "is not a folder",
    }
    for wrong, what in wrongs.items():
        with pytest.raises(UsageError, match=what) as caught:
            RunFolder.open(tmp_path / wrong)
        assert caught.value.remedy == f"did you mean {run.path}?"
    in_runs = make_run(tmp_path / "runs", "run-12")
    with pytest.raises(UsageError) as caught:
        RunFolder.open(tmp_path / "run-12")
    assert caught.value.remedy == f"did you mean {in_runs.path}?"
    with pytest.raises(UsageError) as caught:
        RunFolder.open(tmp_path)
    assert str(run.path) in caught.value.remedy
    with pytest.raises(UsageError) as caught:
        RunFolder.open(tmp_path / "nothing-alike" / "x")
    assert caught.value.remedy == "give a run folder: runs/<name>"
    with pytest.raises(UsageError) as caught:
        RunFolder.open(tmp_path / "unlike")
    assert caught.value.remedy.startswith("give a run folder, such as") and str(run.path) in caught.value.remedy


def test_json_is_strict_and_leaves_no_draft(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "run")
    path = run.write_json("plan.json", {"loss": math.inf, "note": Evidence(measure="ü", seen=math.nan), "n": (1, 2)})

    def reject(name: str) -> None:
        raise AssertionError(name)

    assert json.loads(path.read_text(), parse_constant=reject) == {
        "loss": "Infinity",
        "note": {"measure": "ü", "seen": "NaN", "expected": None},
        "n": [1, 2],
    }
    assert sorted(child.name for child in run.path.iterdir()) == ["plan.json"]


def test_a_write_that_fails_leaves_the_old_text_and_no_draft(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        run = RunFolder.create(disk, "run")
        run.write_text("recipe.yaml", "old")
        with pytest.raises(StorageError, match=r"cannot write .*recipe\.yaml: the disk is full"):
            run.write_text("recipe.yaml", "n" * 1_000_000)
        assert run.recipe.read_text() == "old"
        assert sorted(child.name for child in run.path.iterdir()) == ["recipe.yaml"]


def test_a_write_into_a_folder_that_is_gone(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "run")
    run.path.rmdir()
    (tmp_path / "run").touch()
    with pytest.raises(StorageError, match="a file is in the way"):
        run.write_text("recipe.yaml", "x")
