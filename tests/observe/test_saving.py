"""Saving as the loop sees it: what is blocked, what is kept, what is said."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from trainwright.engine.evaluate import Evaluated
from trainwright.observe.cadence import Every
from trainwright.observe.saving import SavePolicy, Saving
from trainwright.state import checkpoint
from trainwright.state.manifest import step_of
from trainwright.state.store import Best, Retention, checkpoints, read_best
from trainwright.state.train_state import TrainState
from trainwright.state.weights import read_weights


class Heard:
    def __init__(self) -> None:
        self.saved_steps: list[int] = []
        self.said: list[str] = []

    def saved(self, step: int, path: str, num_bytes: int, seconds: float, blocked_s: float) -> None:
        self.saved_steps.append(step)


def state_at(step: int) -> TrainState:
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, float(step))
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), step=step)


def saving_in(folder: Path, heard: Heard, clock: Callable[[], float] = lambda: 0.0, **policy: object) -> Saving:
    return Saving(folder, SavePolicy(**policy), told=heard, warn=heard.said.append, clock=clock)  # type: ignore[arg-type]


class Held:
    """Holds writes back until it is let go: the order of things, without a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.begun, write = threading.Event(), threading.Event(), checkpoint.commit

        def waiting(snapshot: checkpoint.Snapshot, folder: Path) -> tuple[Path, int]:
            self.begun.set()
            assert self.go.wait(60)
            return write(snapshot, folder)

        monkeypatch.setattr("trainwright.observe.saving.commit", waiting)


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


def test_where_memory_is_short_training_waits_and_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard, state = Heard(), state_at(1)
    memory = psutil.virtual_memory()
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory._replace(available=100))
    saving = saving_in(tmp_path, heard)
    saving.due(state)
    saving(state)
    assert [step_of(path) for path in checkpoints(tmp_path)] == [1]
    assert len(heard.said) == 1 and "while training waits" in heard.said[0]
    saving.close()


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
    saving = saving_in(tmp_path, Heard(), clock=lambda: now[0], at_least_s=60.0, every=Every(steps=1000))
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
        saving.evaluated(step, Evaluated(loss=1.0, weight=1.0, metrics={"accuracy": accuracy}, seconds=0.0))
        due.append(saving.due(state := state_at(step)))
        saving(state)
    saving.close()
    assert due == [True, True, False, False, False]
    assert read_best(tmp_path) == Best(2, "accuracy", 0.9)
    assert [step_of(path) for path in checkpoints(tmp_path)] == [5, 2]
    resumed = saving_in(tmp_path, heard, best="accuracy", best_is_largest=True)
    resumed.evaluated(6, Evaluated(loss=1.0, weight=1.0, metrics={"accuracy": 0.85}, seconds=0.0))
    assert not resumed.due(state_at(6)), "a resume remembers what was best"
    resumed.close()


def test_an_unknown_metric_is_told_with_what_there_is(tmp_path: Path) -> None:
    heard = Heard()
    saving = saving_in(tmp_path, heard, best="acuracy")
    saving.evaluated(1, Evaluated(loss=1.0, weight=1.0, metrics={"accuracy": 0.1}, seconds=0.0))
    assert len(heard.said) == 1 and "did you mean 'accuracy'" in heard.said[0]
    saving.close()


@pytest.mark.parametrize("poison", ["weight", "moment", "average"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_never_committed(tmp_path: Path, poison: str, value: float) -> None:
    from trainwright.state.ema import Ema

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
    state.model.mask[0, 0] = float("nan")  # type: ignore[index,operator]
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
    later = saving_in(tmp_path, heard)
    later(state_at(2))
    later.close()
    assert [step_of(path) for path in checkpoints(tmp_path)] == [1]
    assert len(heard.said) == 1 and "GB left" in heard.said[0] and "older checkpoints are intact" in heard.said[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
