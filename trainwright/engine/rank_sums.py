"""Sums over ranks, weighted exactly, so that a step on several ranks equals a step of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.rng import reseed, seed_of
from trainwright.checkpoint.shards import is_divided, locals_of
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import World
from trainwright.engine.loss import Accumulated
from trainwright.errors import DataError


class Counted(NamedTuple):
    """Samples and tokens that all ranks trained on in a step."""

    samples: int
    tokens: int


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed all generators for a step of one rank.

    Ranks draw different numbers, and a checkpoint need not store states.
    """
    reseed(seed_of(f"{seed}:step {step}:rank {rank}"))


def combine(done: Accumulated, world: World, device: torch.device) -> Accumulated:
    """Return the combined results of all ranks. ``correction`` then makes the *sum* over the ranks exact.

    With w_r the weight of rank r and W their sum, the loss is sum(w_r loss_r) / W, and so are gradients and metrics.
    Costs one exchange of a few numbers, in float64.
    """
    weight = as_number(done.weight, device)
    names = sorted(done.metrics)
    means = torch.stack([as_number(each, device) for each in (done.loss, *(done.metrics[name] for name in names))])
    counts = weight != 0
    mine = torch.where(counts, means * weight, 0.0)
    summed = world.gather(torch.cat([weight[None], mine])).sum(0)
    total = summed[0]
    loss, *metrics = (summed[1:] / total).to(done.loss.dtype).unbind()
    share = torch.where(counts, weight, 1.0) / torch.where(total != 0, total, 1.0)
    correction = share if done.correction is None else share * done.correction
    exact = correction.to(torch.promote_types(done.loss.dtype, torch.float32))
    return Accumulated(loss, total, done.micro_losses, dict(zip(names, metrics, strict=True)), exact)


def as_number(value: Tensor | float, device: torch.device) -> Tensor:
    """Return a 0-d float64 tensor on ``device``."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)  # on a GPU without waiting


def share_buffers(state: TrainState, world: World) -> None:
    """Copy persistent buffers of model and loss from rank 0 to all ranks, because each rank saw different samples."""
    kept = [
        buffer
        for root in state.roots
        for module in root.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set and buffer.is_contiguous()
    ]
    if kept:
        world.copy_first_(kept)


def sum_counts(state: TrainState, world: World) -> None:
    """Sum the buffers that a module names in ``summed_over_ranks``, which count what the module saw in this step."""
    modules = state.model.modules()
    world.sum_([getattr(each, name) for each in modules for name in getattr(each, "summed_over_ranks", ())])


def fill_missing(parameters: Sequence[Tensor], world: World) -> None:
    """Set zero gradients for parameters that have a gradient only on other ranks, so that all ranks sum the same
    tensors.
    """
    parameters = [p for p in parameters if p.requires_grad]
    here = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device="cpu")
    same = world.gather(torch.tensor([seed_of(str(here.tolist()))], device="cpu"))
    if bool((same == same[0]).all()):
        return
    for parameter, anywhere in zip(parameters, world.gather(here).any(0).tolist(), strict=True):
        if anywhere and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def sum_grads(grads: Sequence[Tensor], world: World, copies: World | None) -> None:
    """Sum gradients over the ranks, except that experts are summed only over the ranks that have the same experts.

    Gradients of divided experts already include the tokens of all ranks among which the experts are divided.
    """
    world.sum_(locals_of(grad for grad in grads if copies is None or not is_divided(grad)))
    if copies is not None:
        copies.sum_(locals_of(grad for grad in grads if is_divided(grad)))


def settle_parts(parameters: Sequence[Any]) -> None:
    """Sum the gradients that are partial sums on each rank, such as a norm's if each rank has part of a sequence."""
    for parameter in parameters:
        grad = parameter.grad
        if is_divided(grad) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


def of_all_ranks(batch: StepBatch) -> StepBatch:
    """Return the samples of all ranks as one micro-batch, because the rank that caused a skip is not known here."""
    return StepBatch((MicroBatch(None, batch.global_ids),), batch.cursor)


def count(batch: StepBatch, world: World) -> Counted:
    """Count what all ranks together trained on.

    Raises:
        DataError: The user's data determine the order, and the ranks read different batches.
    """
    seen = int(batch.cursor.digest[:15] or "0", 16)
    samples, all_tokens, digests = world.gather(torch.tensor([batch.size, batch.tokens, seen], device="cpu")).unbind(1)
    if bool((digests != digests[0]).any()):
        rank = int((digests != digests[0]).nonzero()[0])
        raise DataError(
            f"rank {rank} read other data in epoch {batch.cursor.epoch} than rank 0; each trains a part of them",
            remedy="give every rank the same batches in the same order: draw from torch's global generators, or seed "
            "your own alike, and leave it to Trainwright to share them (a DistributedSampler needs num_replicas=1)",
        )
    return Counted(int(samples.sum()), int(all_tokens.sum()))
