"""Gives all ranks the same start: equal weights, equal data, and no second gradient exchange inside the model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainwright.distributed import World
from trainwright.errors import DataError, UsageError


def copy_first_weights(model: nn.Module, loss: object, world: World) -> None:
    """Copy weights and buffers of the first rank to all ranks, including those of a ``loss`` that is a module.

    Raises UsageError if the model synchronizes ranks itself (DistributedDataParallel, SyncBatchNorm).
    """
    if world.size == 1:
        return
    _require_no_exchange(model)
    roots = [model, *([loss] if isinstance(loss, nn.Module) else [])]
    weights = [each for root in roots for each in root.parameters()]
    buffers = [each for root in roots for each in root.buffers() if each.is_contiguous()]  # skips expanded tensors
    world.copy_first_([*weights, *buffers])


def require_same_data(world: World, data: Mapping[str, str]) -> None:
    """Raise DataError if the data fingerprints in ``data`` differ between ranks."""
    _require_same(world.collect(dict(data)))


def _require_no_exchange(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            raise UsageError(
                "the model is wrapped in DistributedDataParallel, and gradients would be summed twice",
                remedy="pass the module itself: Trainwright synchronizes the ranks",
            )
        if isinstance(module, nn.SyncBatchNorm):
            raise UsageError(
                "the model has SyncBatchNorm, which exchanges statistics in each forward pass, even in the dry run "
                "that the first rank does alone",
                remedy="use BatchNorm in the model and set parallel.sync_batchnorm: true, which exchanges statistics "
                "in training steps only",
            )


def _require_same(prints: list[dict[str, str]]) -> None:
    """Compare fingerprints of the same kind only: not that of a partly read dataset with that of a full one."""
    for name, first in prints[0].items():
        for rank, other in enumerate(prints):
            theirs = other.get(name, "")
            if theirs != first and theirs.partition("(")[2] == first.partition("(")[2]:
                raise DataError(
                    f"rank {rank} has different data in data.{name} than rank 0: an index gives another sample",
                    remedy="build the same dataset on every rank (a fixed seed for random splits, sorted file names); "
                    "Trainwright distributes the samples over the ranks",
                )
