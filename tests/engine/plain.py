"""Helpers of the engine's tests: batches, gradients as a probe receives them, and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainwright.checkpoint.codec import same_bits
from trainwright.checkpoint.cursor import Cursor, MicroBatch, StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.step import StepResult, make_step


def cut(data: Sequence[Tensor], micro: int, *, first_id: int = 0) -> StepBatch:
    """Returns one global batch in micro-batches of ``micro`` rows. The last one may be shorter."""
    rows = len(data[0])
    parts = [
        MicroBatch(tuple(t[at : at + micro] for t in data), np.arange(at, min(at + micro, rows)) + first_id)
        for at in range(0, rows, micro)
    ]
    return StepBatch(tuple(parts), Cursor(0, first_id + rows))


def one_micro(data: Any, rows: int) -> StepBatch:
    return StepBatch((MicroBatch(data, np.arange(rows)),))


def gradients(model: nn.Module, loss: Callable[..., Any], batch: StepBatch) -> Tensor:
    """Returns all gradients of one engine step, as received by a probe, in one vector."""
    seen: list[Tensor] = []

    def look(state: TrainState) -> Mapping[str, Tensor]:
        seen.append(torch.cat([p.grad.flatten() for p in state.model.parameters() if p.grad is not None]))
        return {}

    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.0))
    make_step(loss, probes=[look])(state, batch)
    return seen[0]


def relative_error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, batches: Sequence[StepBatch], **options: Any
) -> list[StepResult]:
    state, advance = TrainState(model, optimizer), make_step(loss, **options)
    return [advance(state, batch) for batch in batches]


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not same_bits(a[name], b[name])]
    assert not different
