"""Attacks that a run withstands: a kill at any call of a save, no inodes, a clock set back, many steps."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import trainwright as tw
from tests.disks import small_disk
from tests.report_pages.runs import BEGAN_S, ended, evaluated, make_run, started, step
from trainwright.checkpoint.checkpoint import CheckpointData, capture, commit
from trainwright.checkpoint.manifest import step_of
from trainwright.checkpoint.store import Best, Retention, checkpoints, newest_valid, prune, read_best, write_best
from trainwright.checkpoint.train_state import TrainState
from trainwright.errors import StorageError
from trainwright.report.pages.report import write_report
from trainwright.report.pages.view import RunView

pytestmark = pytest.mark.slow
RUN = "a" * 16


def state_at(step: int) -> TrainState:
    model = nn.Linear(4, 4)
    return TrainState(model, AdamW(model.parameters(), lr=0.1), step=step)


def save(snapshot: CheckpointData, folder: Path) -> None:
    """As a run does: the checkpoint, the pointer to the best one, and then the older ones go."""
    best = Best(snapshot.step, "loss", 1.0 / snapshot.step)
    path, _ = commit(snapshot, folder, best, RUN)
    write_best(folder, best, RUN)
    prune(folder, path, Retention(newest=1), RUN)


IO = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree")


def killed_at_call(number: int, snapshot: CheckpointData, folder: Path) -> bool:
    """Saves in a child that is killed at that call of the operating system; False where it has made fewer."""
    child = os.fork()
    if child == 0:
        left = [number]

        def count(event: str, args: tuple[object, ...]) -> None:
            if event in IO:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            save(snapshot, folder)
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.process
@pytest.mark.parametrize("replaces", [False, True], ids=["a new step", "the same step again"])
def test_a_kill_at_any_call_of_a_save_loses_no_checkpoint(tmp_path: Path, replaces: bool) -> None:
    first, second = capture(state_at(1)), capture(state_at(1 if replaces else 2))
    number, killed = 0, True
    while killed:
        number += 1
        folder = tmp_path / str(number)
        save(first, folder)
        killed = killed_at_call(number, second, folder)
        newest, broken = newest_valid(folder, run=RUN)
        assert newest is not None and not broken and (step_of(newest) in (1, second.step))
        best = read_best(folder, RUN)
        assert best.step == step_of(newest) if best else newest.suffix == ".old", "it was being replaced"
        save(capture(state_at(3)), folder)
        assert [path.name for path in sorted(folder.iterdir())] == ["best.json", "step-00000003"], "it is tidied up"
    assert number > 15


@pytest.fixture
def few_inodes(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "size=4m,nr_inodes=14") as disk:
        yield disk


def test_a_disk_without_inodes_keeps_what_is_there(few_inodes: Path) -> None:
    for number in (1, 2):
        commit(capture(state_at(number)), few_inodes, run=RUN)
    with pytest.raises(StorageError, match="could not be written") as caught:
        commit(capture(state_at(3)), few_inodes, run=RUN)
    assert caught.value.remedy and [step_of(path) for path in checkpoints(few_inodes)] == [2, 1]
    assert newest_valid(few_inodes, run=RUN)[1] == [] and not list(few_inodes.glob(".*"))


def test_a_clock_that_was_set_back(tmp_path: Path) -> None:
    records = [
        started(),
        step(1),
        step(2),
        started(2, at_s=BEGAN_S - 9e6),
        step(3, at_s=BEGAN_S - 9e6),
        evaluated(3, 0.5),
    ]
    view = RunView.read(make_run(tmp_path, "run", [*records, ended(3)]).path)
    assert view.step == 3 and view.seconds >= 0.0 and view.state == "finished"
    assert write_report([view.folder.path]).path.is_file()


def test_memory_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    early, late = range(400, 801, 100), range(1600, 2001, 100)
    held: dict[int, int] = {}

    def count(result: tw.StepResult, state: tw.TrainState) -> None:
        if result.step in early or result.step in late:
            gc.collect()
            held[result.step] = len(gc.get_objects())

    tw.fit(
        nn.Linear(4, 1),
        (torch.randn(64, 4), torch.randn(64, 1)),
        nn.MSELoss(),
        until="2000steps",
        batch=8,
        quiet=True,
        observers=[count],
        settings={"folder": str(tmp_path), "checkpoint.every": "100steps", "log.every": "1steps"},
    )
    # The recorder holds a varying number of full steps, so single counts differ by thousands of objects.
    growth = min(held[step] for step in late) - max(held[step] for step in early)
    assert growth < late[0] - early[-1], f"each step leaves an object behind: {held}"
