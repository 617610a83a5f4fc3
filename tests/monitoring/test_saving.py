"""Saving as the loop sees it: what is blocked, what is kept, what is said."""

from __future__ import annotations

import shutil
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.checkpoint import checkpoint
from trainwright.checkpoint.manifest import step_of
from trainwright.checkpoint.store import Best, Retention, checkpoints, read_best
from trainwright.checkpoint.train_state import TrainState
from trainwright.checkpoint.weights import read_weights
from trainwright.engine.evaluate import EvaluationResult
from trainwright.errors import CheckpointError, UsageError
from trainwright.monitoring.cadence import Every
from trainwright.monitoring.journal import Journal
from trainwright.monitoring.saving import SavePolicy, Saving
from trainwright.monitoring.step_log import StepLog
from trainwright.runs.reader import read
from trainwright.runs.records import NotSaved
from trainwright.runs.writer import LogWriter


class Heard:
    def __init__(self) -> None:
        self.saved_steps: list[int] = []
        self.not_saved_steps: list[int] = []
        self.said: list[str] = []

    def saved(self, step: int, path: str, num_bytes: int, seconds: float, blocked_s: float) -> None:
        self.saved_steps.append(step)

    def not_saved(self, step: int, reason: str) -> None:
        self.not_saved_steps.append(step)
        assert reason in self.said[-1]


def state_at(step: int) -> TrainState:
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, float(step))
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), step=step)


def saving_in(folder: Path, heard: Heard, clock: Callable[[], float] = lambda: 0.0, **policy: object) -> Saving:
    return Saving(folder, SavePolicy(**policy), listener=heard, warn=heard.said.append, clock=clock)  # type: ignore[arg-type]


def seen(loss: float) -> EvaluationResult:
    return EvaluationResult(loss=loss, weight=1.0, metrics={}, seconds=0.0)


class Held:
    """Holds writes back until it is let go: the order of things, without a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.begun, write = threading.Event(), threading.Event(), checkpoint.commit

        def waiting(snapshot: checkpoint.CheckpointData, folder: Path, best: Best | None, run: str) -> tuple[Path, int]:
            self.begun.set()
            assert self.go.wait(60)
            return write(snapshot, folder, best, run)

        monkeypatch.setattr("trainwright.monitoring.saving.commit", waiting)


def test_training_goes_on_while_it_is_written_and_cannot_tear_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, heard, state = Held(monkeypatch), Heard(), state_at(1)
    saving = saving_in(tmp_path, heard)
    assert not saving.due(state)  # asked after the first step, it makes room for the copy
    saving(state)
    assert held.begun.wait(60)
    assert checkpoints(tmp_path) == [] and heard.saved_steps == []
    nn.init.constant_(state.model.weight, -1.0)  # type: ignore[arg-type]
    held.go.set()
    saving.close()
    assert heard.saved_steps == [1] and saving.last == checkpoints(tmp_path)[0]
    assert read_weights(saving.last)["weight"].unique().tolist() == [1.0]


def test_without_a_copy_training_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, heard, state = Held(monkeypatch), Heard(), state_at(1)
    held.go.set()
    saving = saving_in(tmp_path, heard, asynchronous=False)
    saving.due(state)
    saving(state)
    assert [step_of(path) for path in checkpoints(tmp_path)] == [1], "it is there when the call returns"
    saving.close()
    assert heard.saved_steps == [1]


def test_where_memory_is_short_training_waits_and_it_is_said(tmp_path: Path) -> None:
    heard, state = Heard(), state_at(1)
    saving = Saving(tmp_path, SavePolicy(), listener=heard, warn=heard.said.append, free_memory=lambda: 100)
    saving.due(state)
    saving(state)
    assert [step_of(path) for path in checkpoints(tmp_path)] == [1]
    assert len(heard.said) == 1 and "while training waits" in heard.said[0]
    saving.close()


def test_where_memory_ran_out_before_the_first_save_no_copy_is_thought_of(tmp_path: Path) -> None:
    heard, state = Heard(), state_at(1)
    asked: list[int] = []
    state.micro_limit = 1

    def free_memory() -> int:
        asked.append(1)
        return 2**40

    saving = Saving(tmp_path, SavePolicy(), listener=heard, warn=heard.said.append, free_memory=free_memory)
    saving.due(state)
    saving(state)
    assert [step_of(path) for path in checkpoints(tmp_path)] == [1], "it is there when the call returns"
    saving.close()
    assert asked == [] and heard.said == []


def test_one_write_at_a_time_and_none_is_lost(tmp_path: Path) -> None:
    heard = Heard()
    saving = saving_in(tmp_path, heard, retention=Retention(100))
    for step in range(1, 21):
        saving(state_at(step))
        saving(state_at(step))  # saved already: costs nothing
    saving.close()
    assert heard.saved_steps == list(range(1, 21))
    for path in checkpoints(tmp_path):
        assert read_weights(path)["weight"].unique().tolist() == [step_of(path)]


def test_a_save_is_due_when_the_last_one_is_too_old(tmp_path: Path) -> None:
    now = [100.0]
    saving = saving_in(tmp_path, Heard(), clock=lambda: now[0], max_age_s=60.0, every=Every(steps=1000))
    due = []
    for step, now[0] in enumerate((130.0, 159.0, 160.5, 161.0, 220.0, 221.0), start=1):
        due.append(saving.due(state := state_at(step)))
        if due[-1]:
            saving(state)
    saving.close()
    assert due == [False, False, True, False, False, True]


def test_the_best_is_saved_when_it_is_seen_and_kept(tmp_path: Path) -> None:
    heard = Heard()
    saving = saving_in(tmp_path, heard, best="accuracy", best_is_largest=True, retention=Retention(1))
    due = []
    for step, accuracy in enumerate((0.5, 0.9, 0.7, float("nan"), 0.8), start=1):
        saving.evaluated(step, EvaluationResult(loss=1.0, weight=1.0, metrics={"accuracy": accuracy}, seconds=0.0))
        due.append(saving.due(state := state_at(step)))
        saving(state)
    saving.close()
    assert due == [True, True, False, False, False]
    assert read_best(tmp_path) == Best(2, "accuracy", 0.9)
    assert [step_of(path) for path in checkpoints(tmp_path)] == [5, 2]
    resumed = saving_in(tmp_path, heard, best="accuracy", best_is_largest=True)
    resumed.evaluated(6, EvaluationResult(loss=1.0, weight=1.0, metrics={"accuracy": 0.85}, seconds=0.0))
    assert not resumed.due(state_at(6)), "a resume remembers what was best"
    resumed.close()


def on(batches: int, loss: float) -> EvaluationResult:
    return EvaluationResult(loss, 1.0, batches=batches)


def test_the_best_compares_evaluations_of_the_same_batches(tmp_path: Path) -> None:
    saving = saving_in(tmp_path, Heard(), best="loss", best_batches=4)
    for step, losses in enumerate(((on(4, 0.5),), (on(4, 0.6), on(0, 0.1))), start=1):
        for each in losses:
            saving.evaluated(step, each)
        saving(state_at(step))
    saving.close()
    assert read_best(tmp_path) == Best(1, "loss", 0.5, 4), "0.1 is of the whole set"
    resumed = saving_in(tmp_path, Heard(), best="loss", best_batches=0)
    resumed.evaluated(3, on(0, 0.7))
    assert resumed.due(state_at(3)), "the value on four batches says nothing about the whole set"
    resumed.close()


def test_the_best_of_an_earlier_version_still_has_to_be_beaten(tmp_path: Path) -> None:
    saving = saving_in(tmp_path, Heard(), best="loss")
    saving.evaluated(1, seen(0.5))
    saving(state_at(1))
    saving.close()
    (tmp_path / "best.json").write_text('{"step": 1, "metric": "loss", "value": 0.5}')
    resumed = saving_in(tmp_path, Heard(), best="loss", best_batches=4)
    resumed.evaluated(2, on(4, 0.6))
    assert not resumed.due(state_at(2))
    resumed.evaluated(3, on(4, 0.4))
    assert resumed.due(state_at(3))
    resumed.close()


def test_what_a_share_of_the_run_asks_for_is_passed_over_within_a_second_of_the_last_save(tmp_path: Path) -> None:
    now = [0.0]
    saving = saving_in(tmp_path, Heard(), clock=lambda: now[0], every=Every(steps=2), min_interval_s=1.0)
    saved = []
    for step in range(1, 13):
        now[0] = 0.3 * step
        if saving.due(state := state_at(step)):
            saving(state)
            saved.append(step)
    saving.close()
    assert saved == [4, 8, 12]


def test_an_unknown_metric_is_told_with_what_there_is(tmp_path: Path) -> None:
    saving = saving_in(tmp_path, Heard(), best="acuracy")
    with pytest.raises(UsageError, match="did you mean 'accuracy'"):
        saving.evaluated(1, EvaluationResult(loss=1.0, weight=1.0, metrics={"accuracy": 0.1}, seconds=0.0))
    saving.close()


@pytest.mark.parametrize("poison", ["weight", "moment", "average"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_never_committed(tmp_path: Path, poison: str, value: float) -> None:
    from trainwright.checkpoint.average import Ema

    heard, state = Heard(), state_at(1)
    saving = saving_in(tmp_path, heard)
    saving(state)
    state.ema = Ema(state.model, 0.9)
    state.optimizer = torch.optim.AdamW(state.model.parameters())
    state.model(torch.ones(1, 4)).sum().backward()
    state.optimizer.step()
    weight = state.model.weight
    assert isinstance(weight, nn.Parameter)
    broken = {
        "weight": weight,
        "moment": state.optimizer.state[weight]["exp_avg"],
        "average": state.ema.shadow["weight"],
    }
    broken[poison].data[1, 2] = value
    state.step = 2
    saving(state)
    saving.close()
    assert [step_of(path) for path in checkpoints(tmp_path)] == [1]
    assert len(heard.said) == 1 and "step 2 is not finite" in heard.said[0] and "weight" in heard.said[0]


def test_a_mask_of_infinities_in_a_buffer_is_no_poison_but_nan_is(tmp_path: Path) -> None:
    heard, state = Heard(), state_at(1)
    state.model.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
    saving = saving_in(tmp_path, heard)
    saving(state)
    state.model.mask[0, 0] = float("nan")  # type: ignore[operator]
    state.step = 2
    saving(state)
    saving.close()
    assert heard.saved_steps == [1] and "mask" in heard.said[0]


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    saving = saving_in(tmp_path, heard)
    saving(state_at(1))
    saving.close()
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    later = saving_in(tmp_path, heard, retention=Retention(newest=1))
    later(state_at(2))
    later.close()
    assert [step_of(path) for path in checkpoints(tmp_path)] == [1], "the only one is not deleted for the next"
    assert len(heard.said) == 1 and "MB left" in heard.said[0] and "older checkpoints are intact" in heard.said[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize(("room", "best", "left"), [(3, False, [4, 3]), (2, False, [4, 3]), (2, True, [2, 1])])
def test_a_disk_with_little_room_deletes_what_the_save_replaces_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, best: bool, left: list[int]
) -> None:
    """With room for two, the best and the newest stay, and nothing more is saved."""
    heard = Heard()
    saving = saving_in(tmp_path, heard, retention=Retention(newest=2), best="loss")

    def usage(path: object) -> object:
        return type("usage", (), {"free": 2**40 if len(checkpoints(tmp_path)) < room else 1000})

    monkeypatch.setattr("shutil.disk_usage", usage)
    for step in range(1, 5):
        saving(state_at(step))
        if step == 1 and best:
            saving.evaluated(1, seen(0.5))
    saving.close()
    assert heard.saved_steps == ([1, 2] if best else [1, 2, 3, 4])
    assert [step_of(path) for path in checkpoints(tmp_path)] == left


def test_where_no_copy_can_be_made_training_waits_and_it_is_said_once(tmp_path: Path) -> None:
    heard, state = Heard(), state_at(1)
    state.model.register_buffer("huge", torch.zeros(1).expand(2**55))  # more than can be addressed
    saving = Saving(tmp_path, SavePolicy(), listener=heard, warn=heard.said.append, free_memory=lambda: 2**60)
    saving.due(state)
    state.model.register_buffer("huge", torch.zeros(1))
    saving(state)
    assert [step_of(path) for path in checkpoints(tmp_path)] == [1], "it is there when the call returns"
    state.step = 2
    saving.due(state)
    saving(state)
    saving.close()
    assert heard.saved_steps == [1, 2]
    assert len(heard.said) == 1 and "while training waits" in heard.said[0]


class Unsavable(nn.Linear):
    """Extra state of a user's own: what ``get_extra_state`` gives or raises can be changed."""

    extra: Any = 0

    def get_extra_state(self) -> Any:
        if isinstance(self.extra, Exception):
            raise self.extra
        return self.extra

    def set_extra_state(self, state: Any) -> None: ...


def unsavable_at(step: int) -> tuple[TrainState, Unsavable]:
    model = Unsavable(4, 4)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), step=step), model


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("where", ["extra state", "parameter group"])
def test_state_that_can_never_be_saved_is_told_after_the_first_step(
    tmp_path: Path, where: str, asynchronous: bool
) -> None:
    heard, (state, model) = Heard(), unsavable_at(1)
    if where == "extra state":
        model.extra = {1, 2}
    else:
        state.optimizer.param_groups[0]["history"] = deque([1.0])
    saving = saving_in(tmp_path, heard, asynchronous=asynchronous)
    with pytest.raises(CheckpointError, match="cannot be saved") as caught:
        saving.due(state)
    assert caught.value.remedy
    saving.close()


@pytest.mark.parametrize("error", [ValueError("no"), RuntimeError("no"), OSError(28, "No space left"), MemoryError()])
def test_whatever_a_capture_raises_leaves_the_run_going(tmp_path: Path, error: Exception) -> None:
    heard, (state, model) = Heard(), unsavable_at(1)
    saving = saving_in(tmp_path, heard)
    saving.due(state)
    model.extra = error
    saving(state)
    model.extra, state.step = 0, 2
    saving.due(state)
    saving(state)
    saving.close()
    assert (heard.not_saved_steps, heard.saved_steps) == ([1], [2])
    assert len(heard.said) == 1 and "step 1 is not saved" in heard.said[0] and "(" in heard.said[0]


def test_whatever_comes_ahead_of_a_save_leaves_the_run_going(tmp_path: Path) -> None:
    root = tmp_path / "a file"
    root.write_text("")
    heard = Heard()
    folder_guard = (root / "run").mkdir  # the root of the run folder was replaced: NotADirectoryError
    saving = Saving(tmp_path / "run", SavePolicy(), listener=heard, warn=heard.said.append, folder_guard=folder_guard)
    saving(state_at(1))
    saving.close()
    assert heard.not_saved_steps == [1] and "a part of the path is a file" in heard.said[0]


def test_what_is_deleted_during_the_last_save_is_laid_down_again(tmp_path: Path) -> None:
    recipe, heard = tmp_path / "recipe.yaml", Heard()
    saving = Saving(tmp_path, SavePolicy(), listener=heard, warn=heard.said.append, folder_guard=recipe.touch)
    saving(state_at(1))
    recipe.unlink()
    saving.close()
    assert recipe.exists() and heard.saved_steps == [1] and not heard.said


def test_what_cannot_be_laid_down_again_leaves_the_checkpoint_saved(tmp_path: Path) -> None:
    papers, heard = tmp_path / "papers", Heard()
    saving = Saving(tmp_path, SavePolicy(), listener=heard, warn=heard.said.append, folder_guard=papers.mkdir)
    saving(state_at(1))  # makes it; afterwards it is there: FileExistsError
    saving.close()
    assert heard.saved_steps == [1] and not heard.not_saved_steps and "lacks its metadata" in heard.said[0]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_whatever_a_write_raises_leaves_the_run_going(tmp_path: Path, asynchronous: bool) -> None:
    heard = Heard()
    papers: dict[str, Any] = {"model": object()}  # no JSON: TypeError
    policy = SavePolicy(asynchronous=asynchronous)
    saving = Saving(tmp_path, policy, listener=heard, warn=heard.said.append, run_metadata=papers)
    saving.due(state_at(1))
    saving(state_at(1))
    saving(state_at(2))
    while heard.not_saved_steps != [1, 2]:
        saving.due(state_at(2))
    papers["model"] = "mlp"
    saving(state_at(3))
    saving.close()
    assert (heard.not_saved_steps, heard.saved_steps) == ([1, 2], [3])
    assert "TypeError" in heard.said[0]


def test_a_run_folder_that_goes_between_commit_and_tidying_up_leaves_the_run_going(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit_and_lose(
        snapshot: checkpoint.CheckpointData, folder: Path, best: Best | None, run: str
    ) -> tuple[Path, int]:
        written = checkpoint.commit(snapshot, folder, best, run)
        shutil.rmtree(folder)
        return written

    monkeypatch.setattr("trainwright.monitoring.saving.commit", commit_and_lose)
    heard = Heard()
    saving = saving_in(tmp_path / "checkpoints", heard, best="loss")
    saving.evaluated(1, seen(1.0))
    saving(state_at(1))
    saving(state_at(2))
    saving.close()
    assert heard.saved_steps == [1, 2]
    assert len(heard.said) == 1 and "could not be removed" in heard.said[0], "there is no folder for best.json"


def test_a_save_that_failed_is_in_the_log(tmp_path: Path) -> None:
    journal = Journal(LogWriter(tmp_path / "log.jsonl"), pytest.fail)
    recorder, said = StepLog(journal, [], Every(steps=1)), list[str]()
    state = state_at(3)
    nn.init.constant_(state.model.weight, float("nan"))  # type: ignore[arg-type]
    saving = Saving(tmp_path / "checkpoints", SavePolicy(), listener=recorder, warn=said.append)
    saving(state)
    saving.close()
    journal.close()
    (record,) = read(tmp_path / "log.jsonl").records
    assert isinstance(record, NotSaved) and record.step == 3
    assert "step 3 is not finite" in record.reason and record.reason in said[0]


def test_a_best_that_could_not_be_captured_is_told_once_and_forgotten(tmp_path: Path) -> None:
    heard, (state, model) = Heard(), unsavable_at(1)
    saving = saving_in(tmp_path, heard, best="loss")
    model.extra = ValueError("no")
    saving.evaluated(1, seen(0.5))
    saving(state)
    model.extra = 0
    for state.step in (2, 3):
        assert not saving.due(state)
    saving.evaluated(3, seen(0.7))  # worse than the one that is lost
    assert saving.due(state)
    saving(state)
    saving.close()
    assert read_best(tmp_path) == Best(3, "loss", 0.7)
    assert len(heard.said) == 1


def test_a_best_that_could_not_be_written_is_none(tmp_path: Path) -> None:
    heard, state = Heard(), state_at(1)
    saving = saving_in(tmp_path, heard, best="loss")
    for step, loss in enumerate((0.9, 0.1, 0.5), start=1):
        state.step = step
        saving.evaluated(step, seen(loss))
        assert saving.due(state)
        nn.init.constant_(state.model.weight, float("nan" if step == 2 else 1.0))  # type: ignore[arg-type]
        saving(state)
    saving.close()
    assert (heard.saved_steps, heard.not_saved_steps) == ([1, 3], [2])
    assert read_best(tmp_path) == Best(3, "loss", 0.5)


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_step_that_is_saved_already_may_turn_out_to_be_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_disk: bool
) -> None:
    held, heard = Held(monkeypatch), Heard()
    held.go.set()
    saving = saving_in(tmp_path, heard, best="loss")
    saving.evaluated(1, seen(0.5))
    saving(state_at(1))
    state = state_at(2)
    saving.due(state)
    if on_disk:
        saving(state)
        while heard.saved_steps != [1, 2]:
            saving.due(state)
    else:
        held.go.clear()
        saving(state)
        threading.Timer(0.05, held.go.set).start()
    saving.evaluated(2, seen(0.4))
    assert not saving.due(state)
    saving(state)
    saving.close()
    assert heard.saved_steps == [1, 2] and heard.said == []
    assert read_best(tmp_path) == Best(2, "loss", 0.4)


def test_a_step_that_could_not_be_saved_is_not_the_best(tmp_path: Path) -> None:
    heard, state = Heard(), state_at(2)
    saving = saving_in(tmp_path, heard, best="loss")
    saving.evaluated(1, seen(0.5))
    saving(state_at(1))
    nn.init.constant_(state.model.weight, float("nan"))  # type: ignore[arg-type]
    saving(state)
    saving.evaluated(2, seen(0.4))
    assert not saving.due(state)
    saving.close()
    assert heard.not_saved_steps == [2] and read_best(tmp_path) == Best(1, "loss", 0.5)


def test_a_best_written_by_hand_does_not_stop_the_run(tmp_path: Path) -> None:
    heard = Heard()
    first = saving_in(tmp_path, heard)
    first(state_at(1))
    first.close()
    (tmp_path / "best.json").write_text('{"step": 1, "metric": "loss", "value": "0.3"}')
    saving = saving_in(tmp_path, heard, best="loss")
    saving.evaluated(2, seen(0.7))
    assert saving.due(state_at(2))
    saving.close()
