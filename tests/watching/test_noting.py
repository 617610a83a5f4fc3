"""What is noted of a resting step is the program that is recorded of one that is heard whole."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from trainwright.recorder.hooks import listening
from trainwright.recorder.noting import NotedStep, NotingRecorder
from trainwright.recorder.numbers import Numbers, begin_reading
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.program_changes import _key_of
from trainwright.recorder.veto import Veto

Loop = Callable[[nn.Module, Optimizer, StepLR, int], None]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(32, 4, generator=generator), torch.randint(3, (32,), generator=generator)


def plain(model: nn.Module, optimizer: Optimizer, scheduler: StepLR, step: int) -> None:
    x, y = batch(step)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def clipped(model: nn.Module, optimizer: Optimizer, scheduler: StepLR, step: int) -> None:
    x, y = batch(step)
    model.zero_grad()
    (F.cross_entropy(model(x), y) + 1e-3 * model(x).square().mean()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def noisy(model: nn.Module, optimizer: Optimizer, scheduler: StepLR, step: int) -> None:
    x, y = batch(step)
    optimizer.zero_grad()
    outputs = model(x)
    noise = 0.1 * torch.randn_like(outputs)  # a constant, and no operation of the program
    F.cross_entropy(outputs + noise, y).backward()
    optimizer.step()


def accumulated(model: nn.Module, optimizer: Optimizer, scheduler: StepLR, step: int) -> None:
    optimizer.zero_grad()
    for part in range(2):
        x, y = batch(2 * step + part)
        (F.cross_entropy(model(x), y) / 2).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    optimizer.step()


def scheduled(model: nn.Module, optimizer: Optimizer, scheduler: StepLR, step: int) -> None:
    plain(model, optimizer, scheduler, step)
    scheduler.step()


def retained(model: nn.Module, optimizer: Optimizer, scheduler: StepLR, step: int) -> None:
    x, y = batch(step)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def carried(model: nn.Module, optimizer: Optimizer, scheduler: StepLR, step: int) -> None:
    x, y = batch(step)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def edited(model: nn.Module, optimizer: Optimizer, scheduler: StepLR, step: int) -> None:
    x, y = batch(step)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    next(model.parameters()).grad.mul_(2.0)  # type: ignore[union-attr]
    optimizer.step()


LOOPS: tuple[Loop, ...] = (plain, clipped, noisy, accumulated, scheduled, retained, carried, edited)
NOTED: tuple[Loop, ...] = (plain, clipped, noisy, accumulated, scheduled)


def record(loop: Loop, *, rests: bool) -> list[tuple[RecordedStep, Numbers]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    steps: list[tuple[RecordedStep, Numbers]] = []
    veto = Veto([model], list(model.parameters()), "skip")

    def closed(step: RecordedStep) -> None:
        steps.append((step, step.numbers() if isinstance(step, NotedStep) and step.is_noted else begin_reading(step)()))

    recorder = NotingRecorder(
        [model], [optimizer], closed, before_update=veto.before_update, after_update=veto.after_update
    )
    recorder.is_resting = rests
    with listening([recorder], [model]):
        for step in range(4):
            loop(model, optimizer, scheduler, step)
    return steps


def facts(step: RecordedStep) -> dict[str, object]:
    program = [(type(each).__name__, _key_of(each)) for each in step.program]
    values = {name: value for name, value in step.values.items() if not name.endswith("_s")}
    values["carried"] = "carried" in values  # copies of gradients
    return {
        "program": program,
        "outputs": [len(getattr(each, "outputs", ())) for each in step.program],
        "events": step.events,
        "kinds": step.kinds,
        "rng": [call.rng[0].tolist() for call in step.calls],
        "groups": [update.groups for update in step.updates],
        "values": values,
        "rest": (step.lr, step.num_bytes, step.blind, len(step.losses)),
    }


def test_what_is_noted_is_what_is_recorded() -> None:
    wrong = []
    for loop in LOOPS:
        for (resting, noted), (whole, read) in zip(record(loop, rests=True), record(loop, rests=False), strict=True):
            if (noted, facts(resting)) != (read, facts(whole)):
                wrong.append((loop.__name__, whole.step, facts(resting), facts(whole)))
    assert not wrong, wrong[0]


def test_nothing_of_a_plain_step_is_written_before_it_is_read() -> None:
    for loop in LOOPS:
        for step, numbers in record(loop, rests=True)[1:]:
            assert isinstance(step, NotedStep) and math.isfinite(numbers.norm)
            assert (step._program is None) == (loop in NOTED), loop.__name__
            assert step.calls and step.updates and "step" in step.kinds  # and these do not write it
            assert (step._program is None) == (loop in NOTED), loop.__name__
            assert step.program and not step.notes
