"""Which targets of comparisons a model makes itself: those that become others with other weights, and with others in
place of what a model has made on a way that the program of the step does not know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from trainwright.recorder.program import Operation, RecordedStep, constants_of
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
            p.data.add_((SIZE * size * torch.randn(p.shape, generator=generator, device="cpu")).to(p))
    yield


def other_outputs(recorded: RecordedStep) -> Callable[[Tensor], Tensor]:
    """For ``Intervention.constants``: what had a graph that the program does not know has other values."""
    operations = [each for each in recorded.program if isinstance(each, Operation)]
    cut = {id(c.tensor) for each in operations for c in constants_of((each.args, each.kwargs)) if c.was_cut}

    def other(tensor: Tensor) -> Tensor:
        return tensor + SIZE * tensor.std(correction=0) + SIZE if id(tensor) in cut else tensor

    return other


def others_among(targets: list[Tensor], now: list[Tensor]) -> set[int]:
    """The places of the targets that have other values ``now``; none where there are more or fewer of them."""
    if len(targets) != len(now):
        return set()
    return {n for n, (one, other) in enumerate(zip(targets, now)) if not torch.equal(one, other)}
