"""In a calm loop some methods of listeners rest; nothing that happens once is missed for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from trainwright.recorder.call_state import CallState
from trainwright.recorder.closing import StepClosing
from trainwright.recorder.hooks import listening
from trainwright.recorder.listener import Listener, call_each, methods_of
from trainwright.recorder.probes import Probe
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.resting import CALM, EVERY, Resting
from trainwright.recorder.tape import Tape
from trainwright.runlog.json_values import Event
from trainwright.runlog.records import Examined
from trainwright.watching.families import MEASURES


class Heard(Listener):
    """Counts two events, of which it hears one at times."""

    rests = frozenset({"on_gradients"})

    def __init__(self) -> None:
        self.zeroed: list[int] = []
        self.gradients: list[int] = []
        self.woken: list[Event] = []
        self.step = 0

    def on_zero_grad(self, owner: object) -> None:
        self.zeroed.append(self.step)

    def on_gradients(self) -> None:
        self.gradients.append(self.step)

    def on_woken(self, events: Sequence[Event]) -> None:
        self.woken += events


def listen(steps: int, disturbed_at: int | None = None) -> Heard:
    """A listener after so many steps."""
    listener = Heard()
    resting = Resting([listener], list)
    root = nn.Linear(1, 1)
    for step in range(1, steps + 1):
        listener.step = step
        call_each(methods_of([listener], "on_zero_grad"), root)
        call_each(methods_of([listener], "on_gradients"))
        if step == disturbed_at:
            resting.disturb(step)
        resting.prepare_next(step)
    return listener


def test_what_may_rest_is_heard_in_one_calm_step_of_so_many_and_the_rest_in_each() -> None:
    steps = CALM + 3 * EVERY
    listener = listen(steps)
    assert listener.zeroed == list(range(1, steps + 1))
    assert listener.gradients[:CALM] == list(range(1, CALM + 1))
    assert listener.gradients[CALM:] == [step for step in range(CALM + 1, steps + 1) if step % EVERY == 1]


def test_a_step_with_a_reason_to_look_wakes_all_from_the_next_one_on() -> None:
    at = CALM + 5
    listener = listen(at + CALM + EVERY, disturbed_at=at)
    assert at not in listener.gradients
    assert set(range(at + 1, at + CALM + 1)) <= set(listener.gradients)
    assert any(step not in listener.gradients for step in listener.zeroed if step > at + CALM)


def test_what_wakes_a_step_is_heard_to_its_end_with_what_came_before() -> None:
    listener = Heard()
    resting = Resting([listener], lambda: [("forward", None)])
    resting.prepare_next(CALM + 1)
    call_each(methods_of([listener], "on_gradients"))
    assert resting.is_calm
    resting.wake()
    resting.wake()
    assert not resting.is_calm
    call_each(methods_of([listener], "on_gradients"))
    resting.prepare_next(CALM + 2)
    call_each(methods_of([listener], "on_gradients"))
    assert len(listener.gradients) == 1 and resting.rests and resting.is_calm
    assert listener.woken == [("forward", None)]  # once


def test_an_epoch_that_cuts_a_step_in_two_is_seen_in_resting_steps_too() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(12, 4), torch.randn(12, 2)), batch_size=4)  # three batches
    batches = (batch for _ in range(60) for batch in loader)
    with tw.watch(model, optimizer, loader=loader, out=None, quiet=True, laws="cheap") as watch:
        for number, (x, y) in enumerate(batches):
            if number % 2 == 0:
                optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            if number % 2:
                optimizer.step()
    contract = [each for each in watch.records if isinstance(each, Examined) and each.experiment == "contract"][-1]
    assert contract.values["split_windows"] == [[step, 1, 2] for step in range(2, 91, 3)]


class Closed(Probe):
    """Notes which steps it has heard of, and which of them before an evaluation."""

    closes_late = True

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.before_evaluation: list[int] | None = None

    def on_closed(self, step: RecordedStep) -> None:
        self.steps.append(step.step)

    def on_forward_without_grad(self, root: nn.Module, args: object, kwargs: object) -> None:
        self.before_evaluation = list(self.steps)


def test_a_probe_that_is_told_late_has_all_steps_before_it_hears_of_anything_else() -> None:
    probe, last, model = Closed(), Closed(), nn.Linear(1, 1)
    last.hears_last = True
    closing = StepClosing([probe, last, Probe()], lambda: None)
    with listening([closing, probe], [model]):
        for step in (1, 2):
            closing.close(RecordedStep(step))
        model(torch.zeros(1))
        assert probe.steps == []  # a forward call of training
        with torch.no_grad():
            model(torch.zeros(1))
        assert probe.before_evaluation == [1, 2]
        closing.close(RecordedStep(3))
        model.eval()
        assert probe.steps == [1, 2, 3]
        closing.close(RecordedStep(4))
        closing.close(RecordedStep(5))
        closing.tell()
    assert probe.steps == [1, 2, 3, 4, 5]
    assert last.steps == [2, 3, 5]


def test_a_call_inside_of_another_is_not_told() -> None:
    outer = nn.Sequential(inner := nn.Linear(1, 1))
    heard: list[nn.Module] = []

    class Calls(Listener):
        def on_forward(self, root: nn.Module, args: object, kwargs: object) -> None:
            heard.append(root)

    with listening([Calls()], [outer, inner]):
        outer(torch.zeros(1))
        inner(torch.zeros(1))
        with suppress(RuntimeError):
            outer(torch.zeros(2))
        inner(torch.zeros(1))
    assert heard == [outer, inner, outer, inner]


def test_batches_of_workers_are_copied_in_calm_steps_too_once_one_was_seen() -> None:
    tape, shared = Tape("cpu"), torch.zeros(64).share_memory_()

    def written() -> torch.Tensor:
        (constant,) = tape.write((shared,))
        kept: torch.Tensor = constant.tensor
        return kept

    tape.is_resting = True
    assert written() is shared  # nobody has asked yet
    tape.is_resting = False
    assert not written().is_shared()
    tape.is_resting = True
    assert not written().is_shared()


def test_what_rests_is_a_method_of_a_listener() -> None:
    assert MEASURES  # the probes of all families are defined
    kinds = [Listener]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    resting = {kind.__name__: kind.rests for kind in kinds if kind.rests}
    assert len(resting) > 3
    assert {each for rests in resting.values() for each in rests} <= {*dir(Listener), "on_closed"}


def test_modes_are_read_again_in_a_calm_step_that_changes_them() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    frozen = model[0].weight
    state = CallState([model, *model], [frozen], torch.device("cpu"))
    state.is_resting = True
    assert state.modes_and_wanted() == ((True, True, True), (True,))
    model.eval()
    frozen.requires_grad_(False)
    assert state.modes_and_wanted() == ((True, True, True), (True,))
    state.modes_have_changed()
    assert state.modes_and_wanted() == ((False, False, False), (False,))


def test_each_probe_that_is_told_late_hears_of_all_steps_in_a_row() -> None:
    heard: list[tuple[int, int]] = []

    class Noting(Closed):
        def on_closed(self, step: RecordedStep) -> None:
            heard.append((id(self), step.step))
            if step.step == 2 and self is probes[0]:
                raise ValueError("a mistake of a probe")

    probes = [Noting(), Noting()]
    closing = StepClosing(probes, lambda: None)
    for step in (1, 2, 3):
        closing.close(RecordedStep(step))
    closing.tell()
    assert heard == [(id(probes[0]), 1), (id(probes[0]), 2), *[(id(probes[1]), step) for step in (1, 2, 3)]]
    assert isinstance(probes[0].failed, ValueError) and probes[1].failed is None
