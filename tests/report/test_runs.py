"""``trainwright runs``: finished, killed, running and broken runs in one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright.report.runs import list_runs
from trainwright.runs.folder import RunFolder
from trainwright.runs.lock import RunLock, is_locked
from trainwright.runs.records import Ended, Evaluated, Started, Watched, to_json


def make_run(root: Path, name: str, *, steps: int, ended: str | None) -> RunFolder:
    folder = RunFolder.create(root, name)
    with folder.log.open("w") as log:
        log.write(to_json(Started(time_s=0.0, step=0, version="0", pid=1)) + "\n")
        for step in range(1, steps + 1):
            watched = Watched(time_s=0.0, step=step, loss=1 / step, grad_norm=1.0, lr=0.1, events=[], values={})
            log.write(to_json(watched) + "\n")
        log.write(to_json(Evaluated(time_s=0.0, step=steps, loss=0.5, weight=1.0, metrics={}, seconds=0.1)) + "\n")
        if ended:
            end = Ended(
                time_s=0.0, ending=ended, reason="", step=steps, loss=0.1, val_loss=None, skipped=0, seconds=1.0
            )
            log.write(to_json(end) + "\n")
        log.write('{"kind":"watched","torn')
    return folder


def test_a_resumed_run_began_when_it_began(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run")
    for time_s, step in ((1.6e9, 0), (1.7e9, 5)):
        with folder.log.open("a") as log:
            log.write(to_json(Started(time_s=time_s, step=step, version="0", pid=1)) + "\n")
    folder.recipe.write_text("")
    assert list_runs(tmp_path).rows[0].began_s == 1.6e9


@pytest.mark.slow
def test_every_run_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs"), "done", steps=9000, ended="finished")  # longer than what is read of it
    killed = make_run(Path("runs"), "killed", steps=4, ended=None)
    RunLock.acquire(killed.path).release(clean=False)
    make_run(Path("runs"), "copied", steps=4, ended=None)
    running = make_run(Path("runs"), "running", steps=2, ended=None)
    (tmp_path / "runs/no_run").mkdir()
    lock = RunLock.acquire(running.path)
    try:
        rows = {row.run.name: row for row in list_runs(Path("runs")).rows}
    finally:
        lock.release(clean=True)
    assert {name: row.state for name, row in rows.items()} == {
        "done": "finished",
        "killed": "killed",
        "copied": "no end record",
        "running": "running",
    }
    assert (rows["done"].step, rows["done"].loss, rows["done"].val_loss) == (9000, 1 / 9000, 0.5)
    assert not is_locked(running.path) and not is_locked(Path("runs/no_run"))
    printed = CliRunner().invoke(app, ["runs"]).output.splitlines()
    assert printed[0].split() == ["folder", "began", "(UTC)", "state", "verdict", "step", "loss", "val", "loss"]
    assert "no finding     9,000  0.0001111  0.5000" in next(line for line in printed if "runs/done" in line)
    listed = json.loads(CliRunner().invoke(app, ["runs", "--json"]).output)["runs"]
    assert {each["verdict"]["word"] for each in listed} == {"no finding", "killed", "no end record"}
    assert sorted(each["run"] for each in listed) == ["runs/copied", "runs/done", "runs/killed", "runs/running"]


def test_a_folder_without_runs(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "nowhere").lines() == [f"{tmp_path / 'nowhere'} holds no run"]
