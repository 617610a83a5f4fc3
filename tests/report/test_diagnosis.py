"""The diagnosis of a run as text: it suggests a replay only where that works."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.report_pages import runs
from trainwright.report.diagnosis import diagnosis_of
from trainwright.report.examination import while_it_trains
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import Ended, Examined, Started, Unexamined, Watched


def watched(step: int) -> Watched:
    return Watched(time_s=0.0, step=step, loss=1.0, grad_norm=1.0, lr=0.1)


def run_with(tmp_path: Path, recipe: str | None) -> RunFolder:
    folder = RunFolder.create(tmp_path, "run")
    runs.add(folder, [watched(3)])
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
    assert suggested == ([f"for a closer examination: trainwright replay {report.run} --step 3"] if works else [])
    assert report.to_json()["experiments"] == ["trace"]


def test_a_killed_run_of_several_ranks_has_its_step_and_says_why_nothing_was_recorded(tmp_path: Path) -> None:
    start = replace(runs.started(), settings={"ranks": "{replicate: 2} (default)"})
    lines = diagnosis_of(runs.make_run(tmp_path, "run", [start, runs.step(190)], settings={})).lines()
    assert "/run: step 190, " in lines[0]
    assert "several ranks are only compared" in lines[-1] and "log.doctor" not in lines[-1]


def examined(folder: RunFolder) -> str:
    [line] = [line for line in diagnosis_of(folder).lines() if line.startswith("examined")]
    return line


def test_nothing_found_says_in_what(tmp_path: Path) -> None:
    folder = run_with(tmp_path, None)
    assert "diagnosis: nothing found" in diagnosis_of(folder).lines()
    assert examined(folder).startswith("examined  1 recorded step, none of them replayed; ")
    results = ((3, {"same_losses": True}), (4, {"blind": "it cannot"}))
    runs.add(folder, [Examined(time_s=0.0, step=n, experiment="again", values=values) for n, values in results])
    assert "1 recorded step, 1 of them replayed" in examined(folder)


def test_of_a_long_run_some_steps_are_recorded_and_the_line_says_what_that_means(tmp_path: Path) -> None:
    folder = run_with(tmp_path, None)
    runs.add(folder, [watched(step) for step in (4, 300, 300)])  # a resume repeats a step
    assert examined(folder).startswith(
        "examined  3 of 298 steps (fewer of the later ones; all 298 were checked for NaN and infinity), none "
    )


@pytest.mark.parametrize(
    ("recipe", "hint"),
    [
        (None, 'tw.watch(..., examine="all") takes'),
        ("model:\n  use: live:Net\n", 'tw.fit(..., settings={"log.examine": "all"}) takes'),
        ("model:\n  use: gpt\n", "later: trainwright diagnose {run} --deep"),
    ],
    ids=["a watched loop", "live objects", "a recipe"],
)
def test_one_hint_for_the_kind_of_run(tmp_path: Path, recipe: str | None, hint: str) -> None:
    folder = run_with(tmp_path, recipe)
    runs.add(folder, [Unexamined(time_s=0.0, step=3, experiments=("again",), examined_s=0.25, trained_s=12.0)])
    [line] = [line for line in diagnosis_of(folder).lines() if line.startswith("not examined")]
    assert line.startswith(
        "not examined  no time for 1 experiment: others took 250 ms of 12.2 s in the training thread; "
    )
    assert hint.replace("{run}", str(folder.path)) in line
    assert ("tw.watch" in line) + ("tw.fit" in line) + ("--deep" in line) == 1
    again = {None: "tw.watch(", "model:\n  use: gpt\n": "--set log.examine=all"}.get(recipe, "tw.fit(")
    assert while_it_trains(folder.path).startswith(again)


def test_what_cannot_be_read_is_counted(tmp_path: Path) -> None:
    """Lines that hold no record, and records of a kind that a newer version has."""
    folder = run_with(tmp_path, None)
    whole = diagnosis_of(folder)
    assert (whole.unreadable, whole.unknown) == (0, 0) and "could not be read" not in "\n".join(whole.lines())
    with folder.log.open("a") as log:
        log.write(
            '{"kind": "watched", "step": "three"}\nnonsense\n{"kind": "of_tomorrow", "time_s": 1.0}\n{"kind": "wat'
        )
    report = diagnosis_of(folder)
    assert (report.unreadable, report.unknown) == (2, 1), "a torn last line is none: it may still be written"
    said = "\n".join(report.lines())
    assert "2 lines of its log could not be read" in said and "1 records of its log are of kinds" in said
    assert report.to_json() | {"unreadable": 2, "unknown": 1} == report.to_json()


def test_a_newer_format_is_told(tmp_path: Path) -> None:
    folder = run_with(tmp_path, None)
    for version in (1, 2):
        runs.add(folder, [Started(time_s=0.0, step=3, version="0.9", pid=1, format_version=version)])
        said = diagnosis_of(folder).lines()[2]
        assert ("its folder has format 2" in said and "the version that wrote it" in said) == (version == 2)


def test_a_run_without_the_doctor_is_not_taken_for_a_loop_that_nobody_saw(tmp_path: Path) -> None:
    end = Ended(time_s=0.0, ending="finished", reason="", step=6, loss=None, val_loss=None, skipped=0, seconds=1.0)
    for recipe, said in (("model: mlp\n", "set log.doctor: true"), (None, "loop.unseen")):
        folder = RunFolder.create(tmp_path, "run")
        runs.add(folder, [end])
        if recipe:
            folder.recipe.write_text(recipe)
        lines = replace(diagnosis_of(folder), verbose=True).lines()
        assert "step 6, finished" in lines[0] and said in "\n".join(lines)
        assert ("loop.unseen" in "\n".join(lines)) == (recipe is None)


def test_a_finding_without_a_step_is_printed(tmp_path: Path) -> None:
    """A loop that never steps is exactly what must be told."""
    folder = RunFolder.create(tmp_path, "run")
    facts = {"backwards": 5, "moved": False, "steps_heard": 0, "optimizers": [], "missing": []}
    end = Ended(time_s=0.0, ending="finished", reason="", step=0, loss=None, val_loss=None, skipped=0, seconds=1.0)
    runs.add(folder, [Examined(time_s=0.0, step=1, experiment="calls", values=facts), end])
    report = diagnosis_of(folder)
    assert report.exit_code == 3
    assert any(line.startswith("1. critical: optim.step_never_called") for line in report.lines())


def test_a_step_that_was_begun_is_not_a_step_of_the_run(tmp_path: Path) -> None:
    folder = run_with(tmp_path, None)
    runs.add(folder, [Examined(time_s=0.0, step=4, experiment="unfinished", values={"error": None})])
    assert diagnosis_of(folder).step == 3


def test_the_reason_of_one_experiment_is_not_that_of_the_run(tmp_path: Path) -> None:
    folder = run_with(tmp_path, None)
    runs.add(folder, [Examined(time_s=0.0, step=3, experiment="padded", values={"blind": "nothing is padded"})])
    assert not any(line.startswith("not replayed") for line in diagnosis_of(folder).lines())


def test_every_replay_of_a_step_counts(tmp_path: Path) -> None:
    folder = run_with(tmp_path, None)
    runs.add(
        folder,
        [
            Examined(time_s=0.0, step=3, experiment="function", values={}),
            Examined(time_s=0.0, step=4, experiment="calls", values={}),
        ],
    )
    assert "1 recorded step, 1 of them replayed" in examined(folder)
