"""Optimizers with a mode for training and one for evaluation, such as ScheduleFree (Defazio et al. 2024).

While such an optimizer trains, the model has the weights at which gradients are computed. ``eval()`` writes the
averaged weights into the model, and ``train()`` writes the training weights back, but for rounding. An optimizer is
recognized by these two methods. Here the training weights always come back bit for bit, so that neither an evaluation
nor a save changes the training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.checkpoint.chained import parts_of
from trainwright.checkpoint.shards import locals_of


class BothWeights(NamedTuple):
    """The parameters of optimizers with modes, by ``id``: as they are trained, and averaged."""

    training: Mapping[int, Tensor]
    averaged: Mapping[int, Tensor]


def with_modes(optimizer: Optimizer) -> list[Any]:
    """The parts of an optimizer that have the methods ``train()`` and ``eval()``."""
    parts = parts_of(optimizer)
    return [each for each in parts if all(callable(getattr(each, name, None)) for name in ("train", "eval"))]


def names_with_modes(optimizer: Optimizer) -> str:
    """The classes of these parts."""
    return " and ".join(type(each).__name__ for each in with_modes(optimizer))


@torch.no_grad()
def use_training_weights(optimizer: Optimizer) -> None:
    """Puts an optimizer into its mode for training. Does nothing where it has no modes."""
    for part in with_modes(optimizer):
        part.train()


@torch.no_grad()
def use_averaged_weights(optimizer: Optimizer) -> None:
    """Writes the averaged weights into the model. Does nothing where the optimizer has no modes."""
    for part in _stepped(optimizer):
        part.eval()


@contextmanager
def averaged_weights(optimizer: Optimizer) -> Iterator[None]:
    """The model has the averaged weights inside, and then the training weights again, bit for bit.

    The optimizer must be in its mode for training. Costs a copy of the weights where it has modes.
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
    """Copies of both weights; empty where the optimizer has no modes.

    The optimizer is in its mode for training inside. The mode and the weights that it had come back afterwards.
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
    """The parts with modes that have made an update: both weights are the same before."""
    return [part for part in with_modes(optimizer) if part.state]


def _copies(optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    parameters = [p for part in _stepped(optimizer) for group in part.param_groups for p in group["params"]]
    return [(p, p.detach().clone()) for p in parameters]


def _put_back(copies: list[tuple[Tensor, Tensor]]) -> None:
    for parameter, copy in copies:
        parameter.data.copy_(copy)  # .data: the recorder counts the writes that autograd sees
