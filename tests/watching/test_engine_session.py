"""The doctor beside our own engine where a run is out of the ordinary: no step at all, no room for one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch
from torch import nn

import trainwright as tw
from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.doctor.context import RunContext
from trainwright.doctor.diagnose import diagnose
from trainwright.engine.step import StepFn
from trainwright.errors import DataError
from trainwright.recorder.program import RecordedStep, constants_of
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import Examined, Found, Record, Watched
from trainwright.watching import budget
from trainwright.watching.engine import EngineSession

Session: TypeAlias = tuple[EngineSession, tw.TrainState, list[Record]]


@pytest.fixture
def session() -> Iterator[Session]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    state = tw.TrainState(model, torch.optim.Adam(model.parameters(), 0.01))
    written: list[Record] = []
    watched = EngineSession(state, write=written.append)
    yield watched, state, written
    watched.leave()


def batch(step: int, label: int = 0) -> StepBatch:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return StepBatch((MicroBatch((x, torch.full((8,), label)), np.arange(8) + 8 * step),))


def train(watched: EngineSession, state: tw.TrainState, steps: int) -> StepFn:
    advance = watched.around(tw.make_step(nn.CrossEntropyLoss(), witness=watched.witness))
    for step in range(1, steps + 1):
        watched.note(advance(state, batch(step)))
    return advance


def test_a_run_without_a_step_has_no_finding(session: Session) -> None:
    watched, _, written = session
    watched.end(None)
    assert written == [] and watched.findings_log.findings() == []


def test_a_run_whose_steps_do_not_fit_into_the_recorder_ends_well(session: Session) -> None:
    watched, state, written = session
    watched.ring.budget_bytes = 300
    train(watched, state, 6)
    watched.end(None)
    assert len(watched.ring.steps) == 0 and not [each for each in written if isinstance(each, Found)]


def test_where_no_copy_of_the_state_fits_the_run_goes_on(session: Session) -> None:
    watched, state, written = session
    state.optimizer.param_groups[0]["table"] = torch.zeros(1).expand(2**50)  # four million GiB, if it is copied
    train(watched, state, 6)
    watched.end(None)
    assert not watched.ring.snapshots and [each.step for each in written if isinstance(each, Watched)] == [*range(1, 7)]


def test_a_state_that_is_larger_than_the_recorder_is_not_copied_first(session: Session) -> None:
    watched, state, _ = session
    watched.ring.budget_bytes = 100
    state.optimizer.param_groups[0]["table"] = torch.zeros(1).expand(2**50)  # to copy it would raise
    train(watched, state, 2)
    assert watched.ring.refused_bytes > 100 and not watched.failures


@pytest.mark.parametrize("steps", [0, 3])
def test_of_a_step_that_raised_the_operation_is_named(session: Session, steps: int) -> None:
    watched, state, written = session
    advance = train(watched, state, steps)
    with pytest.raises(DataError) as raised:
        advance(state, batch(steps + 1, label=7))
    watched.end(raised.value)
    (unfinished,) = [each for each in written if isinstance(each, Examined) and each.experiment == "unfinished"]
    assert unfinished.step == steps + 1 and "cross_entropy" in unfinished.values["failed"]["op"]


def test_the_last_look_is_made_though_the_step_that_raised_cannot_be_run_again(session: Session) -> None:
    """The model has another module since: nothing can be restored."""
    watched, state, written = session
    advance = train(watched, state, 3)
    state.model.register_module("late", nn.Linear(1, 1))
    with pytest.raises(DataError) as raised:
        advance(state, batch(4, label=7))
    before = len(written)
    watched.end(raised.value)
    assert [each for each in written[before:] if isinstance(each, Examined)]


def test_no_batch_is_held_in_shared_memory(session: Session) -> None:
    """A worker's batch is there, and each of its tensors keeps a file open: of a long accumulation too many."""
    watched, state, _ = session
    advance = watched.around(tw.make_step(nn.CrossEntropyLoss(), witness=watched.witness))
    x, y = (tensor.share_memory_() for tensor in batch(1).micro[0].data)
    before = x.clone()
    watched.note(advance(state, StepBatch((MicroBatch((x, y), np.arange(8)),))))
    (call,) = watched.ring.steps[-1].calls
    (held,) = constants_of(call.args)
    assert not held.tensor.is_shared() and torch.equal(held.tensor, before)
    assert watched.ring.steps_to(1) is not None, "it is still the batch that was trained on"


def test_a_step_is_held_with_its_samples(session: Session) -> None:
    watched, state, _ = session
    train(watched, state, 2)
    step: RecordedStep = watched.ring.steps[-1]
    assert [list(ids or ()) for ids in step.ids] == [list(range(16, 24))]


def test_an_observer_that_is_closed_twice_prints_its_findings_once(session: Session, tmp_path: Path) -> None:
    _, state, _ = session
    said: list[str] = []
    observer = EngineSession(state, folder=RunFolder.create(tmp_path, "run"), say=said.append)
    advance = observer.around(tw.make_step(nn.CrossEntropyLoss(), witness=observer.witness))
    for step in (1, 2):
        bad = batch(step)
        bad.micro[0].data[0].fill_(torch.nan)
        observer.observe(advance(state, bad), state)
    observer.close()
    once = list(said)
    log = (tmp_path / "run" / "log.jsonl").read_text()
    observer.close()
    assert any("data.nonfinite" in line for line in once)
    assert said == once and (tmp_path / "run" / "log.jsonl").read_text() == log


def test_checks_pass_in_a_healthy_run_of_the_engine() -> None:
    """The loss module is no second model: what is checked in a loop with one model is checked here."""
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), nn.CrossEntropyLoss()
    state = tw.TrainState(model, torch.optim.Adam(model.parameters(), 0.01), loss=loss)
    written: list[Record] = []
    watched = EngineSession(state, write=written.append)
    train(watched, state, 4)
    watched.end(None)
    states = Counter(each.state for each in diagnose(RunContext(written, finished=True)).checks)
    assert states["passed"] > 90 and not states["found"], states


class Counting(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 3), [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        return torch.softmax(self.linear(x), 1)


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that replays a step finds time."""
    monkeypatch.delenv("TRAINWRIGHT_EXAMINE")
    monkeypatch.setattr(budget, "FREE_S", 0.0)
    monkeypatch.setattr(budget, "EVIDENCE_S", 0.0)


@pytest.mark.usefixtures("no_time")
def test_a_step_that_is_examined_is_recorded_while_it_trains() -> None:
    """No replay is needed to see how its loss is made, and the training has the same bits."""
    torch.manual_seed(0)
    weights = []
    for is_watched in (True, False):
        torch.manual_seed(0)
        model = Counting()
        state, written = tw.TrainState(model, torch.optim.Adam(model.parameters(), 0.01)), list[Record]()
        if is_watched:
            watched = EngineSession(state, write=written.append)
            train(watched, state, 3)
            codes = [each.code for each in watched.findings_log.findings()]
            assert model.calls == [3] and codes == ["loss.softmax_before_cross_entropy"]
            assert watched.runner.replayer.subject.hooks() == (0,) * 2
            watched.end(None)
            assert not model._forward_hooks
        else:
            advance = tw.make_step(nn.CrossEntropyLoss())
            for step in (1, 2, 3):
                advance(state, batch(step))
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.usefixtures("no_time")
def test_a_step_that_raises_while_it_is_recorded_leaves_no_hook_behind(session: Session) -> None:
    watched, state, _ = session
    advance = watched.around(tw.make_step(nn.CrossEntropyLoss(), witness=watched.witness))
    with pytest.raises(DataError) as raised:
        advance(state, batch(1, label=7))
    watched.end(raised.value)
    assert not state.model._forward_hooks and not state.model._forward_pre_hooks
