"""A run writes to files of its own only: a link in its folder leads nowhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trainwright.errors import StorageError
from trainwright.report.pages.report import write_report
from trainwright.runs.deaths import write_bundle
from trainwright.runs.folder import RunFolder
from trainwright.runs.lock import RunLock
from trainwright.runs.writer import LogWriter

CONTENT = "mine " * 200


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    file = tmp_path / "outside"
    file.write_text(CONTENT)
    return file


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "x")


def open_lock(run: RunFolder) -> None:
    RunLock.acquire(run.path).release(clean=True)


def open_log(run: RunFolder) -> None:
    LogWriter(run.log).close()


OPENED: dict[str, Callable[[RunFolder], None]] = {"lock": open_lock, "log.jsonl": open_log}


@pytest.mark.parametrize("name", list(OPENED))
@pytest.mark.parametrize(
    ("link", "said"), [(Path.symlink_to, "symbolic link"), (Path.hardlink_to, "hard link")], ids=["symbolic", "hard"]
)
def test_a_link_is_not_written_through(
    name: str, link: Callable[[Path, Path], None], said: str, run: RunFolder, outside: Path
) -> None:
    link(run.path / name, outside)
    with pytest.raises(StorageError, match=f"{name}: it is a {said}") as caught:
        OPENED[name](run)
    assert outside.read_text() == CONTENT and caught.value.remedy


@pytest.mark.parametrize("name", list(OPENED))
def test_a_link_to_nothing_makes_no_file(name: str, run: RunFolder, tmp_path: Path) -> None:
    (run.path / name).symlink_to(tmp_path / "nothing")
    with pytest.raises(StorageError, match="symbolic link"):
        OPENED[name](run)
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("name", list(OPENED))
def test_what_is_no_file_is_refused_at_once(name: str, run: RunFolder) -> None:
    os.mkfifo(run.path / name)
    with pytest.raises(StorageError, match="not a regular file"):
        OPENED[name](run)


def test_what_is_replaced_as_a_whole_replaces_the_link(run: RunFolder, outside: Path) -> None:
    run.plan.symlink_to(outside)
    run.write_json("plan.json", {"steps": 3})
    assert outside.read_text() == CONTENT and not run.plan.is_symlink()


def test_a_link_at_the_place_of_a_draft(run: RunFolder, outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = run.path / ".plan.json.1-0.draft"
    draft.symlink_to(outside)
    monkeypatch.setattr("trainwright.runs.storage.draft_of", lambda path: draft)
    run.write_json("plan.json", {"steps": 3})
    assert outside.read_text() == CONTENT and run.plan.read_text() == '{\n  "steps": 3\n}\n'


def test_a_link_at_the_place_of_a_bundle(run: RunFolder, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run.bundles.mkdir()
    (run.bundles / ".step-00000007.draft").symlink_to(elsewhere)
    with pytest.raises(StorageError):
        write_bundle(run, 7, None, (), ())
    assert list(elsewhere.iterdir()) == []


def test_a_run_folder_may_lie_behind_a_link(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "y").symlink_to(run.path)
    for open_one in OPENED.values():
        open_one(RunFolder(tmp_path / "y"))
    assert run.log.is_file()


@pytest.mark.parametrize("name", ["samples", "bundles", "export"])
def test_a_folder_of_the_run_that_is_a_link_is_not_written_into(name: str, run: RunFolder, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run.path / name).symlink_to(elsewhere)
    with pytest.raises(StorageError, match=f"{name}: it is a symbolic link") as caught:
        run.write_text(f"{name}/x.txt", "x")
    assert caught.value.remedy and list(elsewhere.iterdir()) == []


@pytest.mark.slow
def test_a_report_is_written_through_no_link(run: RunFolder, outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LogWriter(run.log).close()
    draft = run.path / ".report.html.1-0.draft"
    draft.symlink_to(outside)
    (run.path / "report.html").symlink_to(outside)
    monkeypatch.setattr("trainwright.runs.storage.draft_of", lambda path: draft)
    assert write_report([run.path]).path.read_text().startswith("<!doctype html>")
    assert outside.read_text() == CONTENT and not (run.path / "report.html").is_symlink()
