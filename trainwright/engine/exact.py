"""Gradients whose bits do not depend on the number of ranks: fixed slices, summed in a fixed tree.

A floating-point sum depends on its order, so all-reduces over 2 and over 4 ranks differ in the last bits. Here the
samples of a step are cut into slices that do not depend on the ranks. Each slice has its own gradient and random
numbers, and all slice gradients are summed in one binary tree. Each rank keeps the gradients of its slices until the
sum, and gathers the gradients of the other slices. This costs memory and communication for each slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.rng import reseed, seed_of
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import World
from trainwright.engine.loss import Accumulated, Loss, LossFn, run_divided
from trainwright.engine.precision import Precision
from trainwright.engine.rank_sums import as_number
from trainwright.errors import UsageError


def accumulate_exactly(
    state: TrainState,
    batch: StepBatch,
    loss_fn: LossFn,
    precision: Precision,
    world: World,
    *,
    seed: int,
) -> Accumulated:
    """Run this rank's slices and leave the gradients of the global batch in ``.grad``, bit-identical on every rank.

    Every total is divided by the number of samples of the step, which needs no communication. ``correction`` then
    replaces this divisor by the weight of the step.

    Raises:
        UsageError: The model has running statistics, which depend on the order of the slices.
    """
    _require_no_statistics(state)
    parameters = [p for p in state.parameters if p.requires_grad]
    mine = [micro for micro in batch.micro if micro.size]
    counts = world.collect(len(mine))
    first = sum(counts[: world.rank])
    number = len(batch.global_ids)
    losses: list[Loss] = []
    grads: list[list[Tensor | None]] = []  # by slice; None if the loss does not depend on a parameter
    for index, micro in enumerate(mine, start=first):
        for parameter in parameters:
            parameter.grad = None
        reseed(seed_of(f"{seed}:step {state.step}:slice {index}"))
        where = f"slice {index} of step {state.step + 1}"
        losses.append(run_divided(state, micro, loss_fn, precision, number, where))
        grads.append([p.grad for p in parameters])
    here = [any(each[at] is not None for each in grads) for at in range(len(parameters))]
    has_grad = [any(flags) for flags in zip(*world.collect(here), strict=True)]
    for at, parameter in enumerate(parameters):
        parameter.grad = _summed([each[at] for each in grads], parameter, counts, world) if has_grad[at] else None
    return _combined(losses, batch, counts, world, parameters[0])


def _summed(grads: list[Tensor | None], parameter: Tensor, counts: list[int], world: World) -> Tensor:
    """Return the sum of a parameter's gradient over all slices of all ranks."""
    own = [torch.zeros_like(parameter) if grad is None else grad for grad in grads]
    if _are_subtrees(counts):
        own = [tree_sum(own)]
        counts = [1] * len(counts)
    return tree_sum(_gathered(own, parameter, counts, world))


def _gathered(own: list[Tensor], like: Tensor, counts: list[int], world: World) -> list[Tensor]:
    """Return the tensors of all ranks in rank order; ranks may have different counts."""
    if world.size == 1:
        return own
    most = max(counts)
    padded = [*own, *[torch.zeros_like(like)] * (most - len(own))]
    everywhere = world.gather(torch.stack(padded).flatten()).view(world.size, most, *like.shape)
    return [everywhere[rank, at] for rank, count in enumerate(counts) for at in range(count)]


def _are_subtrees(counts: Sequence[int]) -> bool:
    """Return True if each rank's slices are one subtree of the full tree, so that it can sum them alone."""
    return len(set(counts)) == 1 and counts[0].bit_count() == 1 and len(counts).bit_count() == 1


def tree_sum(leaves: Sequence[Tensor]) -> Tensor:
    """Sum in a binary tree that depends on the number of leaves only.

    The left subtree has the largest power of two that is below the number of leaves.
    """
    if len(leaves) == 1:
        return leaves[0]
    middle = 1 << ((len(leaves) - 1).bit_length() - 1)
    return tree_sum(leaves[:middle]) + tree_sum(leaves[middle:])


def _combined(losses: Sequence[Loss], batch: StepBatch, counts: list[int], world: World, like: Tensor) -> Accumulated:
    """Return loss, weight and metrics of the step, summed over the slices in order, in float64."""
    names = next((list(names) for names in world.collect([*losses[0].metrics] if losses else []) if names), [])
    rows = [
        torch.stack([as_number(value, like.device) for value in (each.weight, each.total, *each.metrics.values())])
        for each in losses
    ]
    table = torch.stack(
        _gathered(rows, torch.zeros(2 + len(names), dtype=torch.float64, device=like.device), counts, world)
    )
    weight, *sums = table.sum(0).unbind()
    divisor = torch.where(weight != 0, weight, 1.0)
    loss, *metrics = [(each / weight).to(like.dtype) for each in sums]
    correction = (len(batch.global_ids) / divisor).to(like.dtype)
    totals = tuple(each.total for each in losses) or (torch.zeros_like(loss),)  # a rank may have no slice
    return Accumulated(loss, weight, totals, dict(zip(names, metrics, strict=True)), correction)


def _require_no_statistics(state: TrainState) -> None:
    for name, module in state.model.named_modules():
        if getattr(module, "track_running_stats", False):
            raise UsageError(
                f"parallel.exact: {name} is a {type(module).__name__}, whose running statistics depend on which rank "
                "saw which samples",
                remedy="use GroupNorm or LayerNorm, or leave parallel.exact out",
            )
