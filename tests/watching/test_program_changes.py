"""A loop that begins to do something else is heard of within 16 steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.watching.loops import X, Y, net
from trainwright.recorder.hooks import listening
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.program_changes import EVERY, ProgramChanges
from trainwright.recorder.recording import LoopRecorder
from trainwright.runs.records import Watched

ONSET, STEPS = 70, 82
"""By then the loop is calm, and only one step in 16 is heard whole: the first of these is 81."""


class Loop:
    """What may become something else at a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.inside: Callable[[Tensor], Tensor] = lambda h: h
        self.loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
        self.before_update: Callable[[], object] = lambda: None
        self.after_update: Callable[[], object] = lambda: None
        self.rows = lambda step: slice(None)
        self.passes = lambda step: 1

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model[1:](self.inside(self.model[0](x)))
        return out


class Net(nn.Module):
    """Calls what the loop holds."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.loop, self.net = [loop], loop.model

    def forward(self, x: Tensor) -> Tensor:
        return self.loop[0].forward(x)


def train(loop: Loop, model: Net, change: Callable[[Loop], object], onset: int, steps: int) -> None:
    for step in range(1, steps + 1):
        if step == onset:
            change(loop)
        loop.optimizer.zero_grad()
        for _ in range(loop.passes(step)):
            rows = loop.rows(step)
            loop.loss(model(X[rows]), Y[rows]).backward()
        loop.before_update()
        loop.optimizer.step()
        loop.after_update()


def heard(change: Callable[[Loop], object], onset: int = ONSET, steps: int = STEPS) -> list[int]:
    """The steps in which another program is heard, by the recorder alone."""
    loop, found = Loop(), list[int]()
    model = Net(loop)
    changes = ProgramChanges(list(model.parameters()))

    def closed(step: RecordedStep) -> None:
        changes.on_closed(step)
        if "changed" in step.values:
            found.append(step.step)
        changes.prepare_next(step.step)

    def nothing(*given: object) -> None: ...

    recorder = LoopRecorder([model], [loop.optimizer], closed, before_update=nothing, after_update=nothing)
    changes.prepare_next(0)
    with listening([recorder, changes], [model]):
        train(loop, model, change, onset, steps)
    assert recorder.failed is None and changes.failed is None
    return found


def in_place(loop: Loop) -> None:
    def shrink() -> None:
        with torch.no_grad():
            for p in loop.model.parameters():
                p.mul_(0.999)

    loop.after_update = shrink


def edited(loop: Loop) -> None:
    loop.before_update = lambda: [p.grad.mul_(0.5) for p in loop.model.parameters() if p.grad is not None]


def set_all(**values: object) -> Callable[[Loop], None]:
    return lambda loop: loop.__dict__.update(values)


CHANGES: dict[str, Callable[[Loop], object]] = {
    "a tensor that is cut off in the model": set_all(inside=lambda h: h.detach()),
    "an operation in the model": set_all(inside=lambda h: h - h.mean(0)),
    "an operation of the loss": set_all(loss=lambda out, y: -F.cross_entropy(out, y)),
    "a dimension": set_all(loss=lambda out, y: F.nll_loss(out.log_softmax(0), y)),
    "a step of a slice": set_all(loss=lambda out, y: F.cross_entropy(out[::2], y[::2])),
    "the mode": lambda loop: loop.model.eval(),
    "what can be trained": lambda loop: loop.model[0].requires_grad_(False),
    "a second backward pass": set_all(passes=lambda step: 2),
    "writes to the weights": in_place,
    "writes to the gradients": edited,
    "a rate of 0": lambda loop: loop.optimizer.param_groups[0].update(lr=0.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_program_is_heard_of(name: str) -> None:
    [at] = heard(CHANGES[name])
    assert ONSET <= at <= ONSET + EVERY


def annealed(loop: Loop) -> None:
    factors = iter(range(1, 1000))
    loop.loss = lambda out, y: F.cross_entropy(out, y) * (1.0 / next(factors))


def clipped_as_it_goes(loop: Loop) -> None:
    thresholds = iter(range(1, 1000))
    loop.before_update = lambda: nn.utils.clip_grad_norm_(loop.model.parameters(), float(next(thresholds)))


def other_numbers(loop: Loop) -> None:
    """Another factor and another threshold in each step, from the first on: that they are there is no change. Later
    another rate, and other rows, of other sizes."""

    def rows(step: int) -> slice:
        if step == ONSET:
            loop.optimizer.param_groups[0].update(lr=0.001)
        return slice(None) if step < ONSET else slice(None, 9 + step % 20)

    annealed(loop)
    clipped_as_it_goes(loop)
    loop.rows = rows


def test_other_numbers_are_no_other_program() -> None:
    assert heard(other_numbers, onset=1) == []


def test_a_loop_that_takes_turns_is_known_after_the_first_steps() -> None:
    def short_now_and_then(loop: Loop) -> None:
        loop.passes = lambda step: 1 if step % 7 == 0 else 3

    assert max(heard(short_now_and_then, onset=1)) == 7


def test_a_program_by_chance_is_not_followed() -> None:
    def by_chance(loop: Loop) -> None:
        names: Iterator[int] = iter(range(10**6))
        loop.loss = lambda out, y: sum((out.sum() * 0.0 for _ in range(next(names))), F.cross_entropy(out, y))

    assert heard(by_chance, onset=1, steps=20) == list(range(3, 18))


def test_what_the_watch_computes_is_no_other_program() -> None:
    """It looks inside of the model in some steps, and a record says in which the program has changed."""
    loop = Loop()
    model = Net(loop)
    with tw.watch(model, loop.optimizer, out=None, quiet=True, examine="listen") as watch:
        train(loop, model, CHANGES["the mode"], 7, 9)
    records = [each for each in watch.records if isinstance(each, Watched)]
    assert [each.step for each in records if "changed" in each.values] == [7]
