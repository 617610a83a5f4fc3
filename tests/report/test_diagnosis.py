"""The diagnosis of a run as text: it suggests a replay only where that works."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from trainwright.report.diagnosis import diagnosis_of
from trainwright.runlog.folder import RunFolder
from trainwright.runlog.records import Watched
from trainwright.runlog.writer import LogWriter


def run_with(tmp_path: Path, recipe: str | None) -> RunFolder:
    folder = RunFolder.create(tmp_path, "run")
    log = LogWriter(folder.log)
    log.write(Watched(time_s=time.time(), step=3, loss=1.0, grad_norm=1.0, lr=0.1, events=(), values={}))
    log.close()
    if recipe is not None:
        folder.recipe.write_text(recipe)
    return folder


@pytest.mark.parametrize(
    ("recipe", "works"),
    [(None, False), ("model:\n  use: live:Net\n", False), ("model:\n  use: gpt\n", True)],
    ids=["a watched loop", "live objects", "a recipe"],
)
def test_a_replay_is_suggested_where_it_works(tmp_path: Path, recipe: str | None, works: bool) -> None:
    report = replace(diagnosis_of(run_with(tmp_path, recipe)), experiments=("trace",))
    suggested = [line for line in report.lines() if "trainwright replay" in line]
    assert suggested == ([f"this would tell more: trace (trainwright replay {report.run} --step 3)"] if works else [])
    assert report.to_json()["experiments"] == ["trace"]
