"""Watched or not, training is the same bits; and each of the last steps comes out the same bits when it is replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from trainwright.replay.replayer import Replayer
from trainwright.replay.session import ReplaySession

STEPS, KEEP = 9, 4


@dataclass
class Step:
    """What the live loop had: its losses, the gradients right before the update, the weights right after it."""

    losses: list[Tensor]
    grads: dict[str, Tensor | None]
    after: dict[str, Tensor]


@dataclass
class Loop:
    """A training loop, and ``step``: one update, which gives its losses and the gradients that it was made with."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], tuple[list[Tensor], dict[str, Tensor | None]]]
    more: dict[str, Any] = field(default_factory=dict)


def batches(x: Tensor, y: Tensor, **how: Any) -> tuple[DataLoader[Any], Iterator[Any]]:
    loader: DataLoader[Any] = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, **how)

    def forever() -> Iterator[Any]:
        while True:
            yield from loader

    return loader, forever()


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def table() -> tuple[Tensor, Tensor]:
    return torch.randn(64, 12), torch.randint(0, 4, (64,))


def plain(
    model: nn.Module, data: tuple[Tensor, Tensor], *, accumulation: int = 1, clip: bool = True, **how: Any
) -> Loop:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader, source = batches(*data, **how)

    def step() -> tuple[list[Tensor], dict[str, Tensor | None]]:
        losses = []
        optimizer.zero_grad()
        for _ in range(accumulation):
            x, y = next(source)
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1) / accumulation
            loss.backward()
            losses.append(loss.detach().clone())
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        grads = grads_of(model)
        optimizer.step()
        scheduler.step()
        return losses, grads

    return Loop(model, optimizer, step, {"loader": loader, "scheduler": scheduler})


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 4))


def fp32_with_dropout() -> Loop:
    return plain(mlp(), table())


def accumulation() -> Loop:
    return plain(mlp(), table(), accumulation=3)


def batch_norm() -> Loop:
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 4),
    )
    return plain(net, (torch.randn(64, 1, 6, 6), torch.randint(0, 4, (64,))), accumulation=2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 16, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x)
        out: Tensor = self.head(hidden[:, -1])
        return out


def lstm() -> Loop:
    return plain(Recurrent(), (torch.randn(64, 7, 5), torch.randint(0, 4, (64,))))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(12, 32)
        self.body = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for _ in range(2):
            hidden = checkpoint(self.body, hidden, use_reentrant=self.reentrant)
        out: Tensor = self.head(hidden)
        return out


def checkpointing_reentrant() -> Loop:
    return plain(Checkpointed(reentrant=True), table())


def checkpointing_not_reentrant() -> Loop:
    return plain(Checkpointed(reentrant=False), table())


def whole_model_checkpointed() -> Loop:
    """The watched model itself is called a second time, inside of backward."""
    model, (x, y) = mlp(), table()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> tuple[list[Tensor], dict[str, Tensor | None]]:
        rows = torch.randperm(64)[:8]
        optimizer.zero_grad()
        loss = F.cross_entropy(checkpoint(model, x[rows], use_reentrant=False), y[rows])
        loss.backward()
        grads = grads_of(model)
        optimizer.step()
        return [loss.detach().clone()], grads

    return Loop(model, optimizer, step)


def workers() -> Loop:
    return plain(mlp(), table(), num_workers=2)


def persistent_workers() -> Loop:
    return plain(mlp(), table(), num_workers=1, persistent_workers=True)


def bf16_autocast() -> Loop:
    model, (x, y) = mlp(), table()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader, source = batches(x, y)

    def step() -> tuple[list[Tensor], dict[str, Tensor | None]]:
        x, y = next(source)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        grads = grads_of(model)
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach().clone()], grads

    return Loop(model, optimizer, step, {"loader": loader})


def fp16_with_scaler() -> Loop:
    model, (x, y) = mlp(), table()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=3)
    loader, source = batches(x, y)

    def step() -> tuple[list[Tensor], dict[str, Tensor | None]]:
        x, y = next(source)
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grads = grads_of(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return [loss.detach().clone()], grads

    return Loop(model, optimizer, step, {"loader": loader, "scaler": scaler})


def closure() -> Loop:
    """As Lightning does it: ``optimizer.step(closure)`` makes the gradients and then the update."""
    model, (x, y) = mlp(), table()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader, source = batches(x, y)

    def step() -> tuple[list[Tensor], dict[str, Tensor | None]]:
        grads: dict[str, Tensor | None] = {}

        def evaluate() -> Tensor:
            x, y = next(source)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            grads.update(grads_of(model))
            return loss

        loss: Any = optimizer.step(evaluate)
        return [loss.detach().clone()], grads

    return Loop(model, optimizer, step, {"loader": loader})


def frozen_by_turns() -> Loop:
    """Which parameters want a gradient changes from step to step."""
    model, (x, y) = mlp(), table()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    count = iter(range(10**6))

    def step() -> tuple[list[Tensor], dict[str, Tensor | None]]:
        model[0].requires_grad_(next(count) % 3 != 0)  # type: ignore[index]
        rows = torch.randperm(64)[:8]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        grads = grads_of(model)
        optimizer.step()
        return [loss.detach().clone()], grads

    return Loop(model, optimizer, step)


CASES = (
    fp32_with_dropout, accumulation, batch_norm, lstm,
    *(pytest.param(each, marks=pytest.mark.slow) for each in (checkpointing_reentrant, checkpointing_not_reentrant)),
    whole_model_checkpointed, bf16_autocast, fp16_with_scaler, closure, frozen_by_turns,
    *(pytest.param(each, marks=pytest.mark.process) for each in (workers, persistent_workers)),
)  # fmt: skip


def train(build: Callable[[], Loop], *, watched: bool) -> tuple[list[Step], Loop, Any]:
    torch.manual_seed(11)
    loop = build()
    kept = []
    around: Any = tw.watch(loop.model, loop.optimizer, out=None, quiet=True, keep=KEEP, **loop.more)
    with around if watched else nullcontext() as watch:
        for _ in range(STEPS):
            losses, grads = loop.step()
            kept.append(Step(losses, grads, {n: p.detach().clone() for n, p in loop.model.named_parameters()}))
    return kept, loop, watch


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return (a is None) == (b is None) and (a is None or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))

    return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("build", CASES, ids=lambda each: each.__name__)
def test_the_same_bits_watched_and_replayed(build: Callable[[], Loop]) -> None:
    alone, bare, _ = train(build, watched=False)
    live, loop, watch = train(build, watched=True)
    for one, other in zip(alone, live, strict=True):
        assert [float(each) for each in one.losses] == [float(each) for each in other.losses]
        assert same(one.after, other.after)
    assert same(dict(bare.model.state_dict()), dict(loop.model.state_dict()))

    session = watch.session
    assert session.step == STEPS
    assert session.failures == []
    player: Replayer = session.runner.replayer
    generator = torch.get_rng_state()
    for step in range(STEPS - KEEP + 1, STEPS + 1):
        played = ReplaySession(player, session.ring, step).run(upto="step")
        then = live[step - 1]
        assert played.error is None
        assert [float(each) for each in played.losses] == [float(each) for each in then.losses], step
        assert same(played.grads, then.grads), step
        assert same(played.after, then.after), step
    assert same(dict(bare.model.state_dict()), dict(loop.model.state_dict())), "a replay left a trace"
    assert torch.equal(generator, torch.get_rng_state())
