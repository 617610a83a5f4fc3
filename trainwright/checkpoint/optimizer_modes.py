"""Optimizers with a mode for training and one for evaluation, such as ScheduleFree (Defazio et al. 2024).

While such an optimizer trains, the model has the weights at which gradients are computed. ``eval()`` writes the
averaged weights into the model, and ``train()`` writes the training weights back, up to rounding. An optimizer is
recognized by these two methods. Here the training weights are always restored bit for bit, so neither an evaluation nor
a save changes the training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.checkpoint.chained_optimizer import parts_of
from trainwright.checkpoint.shards import locals_of


class BothWeights(NamedTuple):
    """Training and averaged weights of optimizers with modes, by ``id`` of the parameter."""

    training: Mapping[int, Tensor]
    averaged: Mapping[int, Tensor]


def with_modes(optimizer: Optimizer) -> list[Any]:
    """Return the parts of an optimizer that have the methods ``train()`` and ``eval()``."""
    parts = parts_of(optimizer)
    return [each for each in parts if all(callable(getattr(each, name, None)) for name in ("train", "eval"))]


def names_with_modes(optimizer: Optimizer) -> str:
    """Return the class names of the parts with modes."""
    return " and ".join(type(each).__name__ for each in with_modes(optimizer))


@torch.no_grad()
def use_training_weights(optimizer: Optimizer) -> None:
    """Set an optimizer to training mode. Does nothing if it has no modes."""
    for part in with_modes(optimizer):
        part.train()


@torch.no_grad()
def use_averaged_weights(optimizer: Optimizer) -> None:
    """Write the averaged weights into the model. Does nothing if the optimizer has no modes."""
    for part in _stepped(optimizer):
        part.eval()


@contextmanager
def averaged_weights(optimizer: Optimizer) -> Iterator[None]:
    """Context in which the model has the averaged weights. The training weights are restored bit for bit.

    The optimizer must be in training mode. Costs a copy of the weights if it has modes.
    """
    kept = _copies(optimizer)
    use_averaged_weights(optimizer)
    try:
        yield
    finally:
        use_training_weights(optimizer)
        _put_back(kept)


@contextmanager
def both_weights(optimizer: Optimizer) -> Iterator[BothWeights]:
    """Context with both weights; empty if the optimizer has no modes.

    The optimizer is in training mode inside, and the training weights may be the live ones. Its mode and weights are
    restored afterwards.
    """
    found = _copies(optimizer)
    use_training_weights(optimizer)
    live = {id(p): p.detach() for p, _ in found}
    was_averaged = any(not torch.equal(*locals_of([p, copy])) for p, copy in found)
    if was_averaged:
        copies = {id(p): copy for p, copy in found}
        both = BothWeights({key: p.clone() for key, p in live.items()}, copies)
    else:
        with averaged_weights(optimizer):
            both = BothWeights(live, {key: p.clone() for key, p in live.items()})
    try:
        yield both
    finally:
        if was_averaged:
            use_averaged_weights(optimizer)
            _put_back(found)


def _stepped(optimizer: Optimizer) -> list[Any]:
    """Return the parts with modes that have made an update; before, both weights are equal."""
    return [part for part in with_modes(optimizer) if part.state]


def _copies(optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    parameters = [p for part in _stepped(optimizer) for group in part.param_groups for p in group["params"]]
    return [(p, p.detach().clone()) for p in parameters]


def _put_back(copies: list[tuple[Tensor, Tensor]]) -> None:
    for parameter, copy in copies:
        parameter.data.copy_(copy)  # .data: the recorder counts the writes that autograd sees
