"""Which targets of comparisons a model makes itself: those that become others with other weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from trainwright.replay.session import ReplaySession

SIZE = 1.0
"""Of a weight's own size by which it is changed: with less, what a model chooses may stay the same choice."""


@contextmanager
def other_weights(session: ReplaySession) -> Iterator[None]:
    """Inside, what is trained has other values. For ``Intervention.model``: within a stage the weights are copies."""
    held = {id(p) for optimizer in session.optimizers for group in optimizer.param_groups for p in group["params"]}
    generator = torch.Generator().manual_seed(0)
    for p in session.replayer.subject.parameters:
        if p.requires_grad and id(p) in held and p.is_floating_point():
            size = float(p.detach().double().square().mean().sqrt()) or 1.0
            p.data.add_((SIZE * size * torch.randn(p.shape, generator=generator)).to(p))
    yield


def others_among(targets: list[Tensor], now: list[Tensor]) -> set[int]:
    """The places of the targets that have other values ``now``; none where there are more or fewer of them."""
    if len(targets) != len(now):
        return set()
    return {n for n, (one, other) in enumerate(zip(targets, now)) if not torch.equal(one, other)}
