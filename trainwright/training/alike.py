"""Ranks begin alike: the same weights, the same data, and a model that leaves the exchange to the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainwright.distributed import World
from trainwright.errors import DataError, UsageError

T = TypeVar("T")


def first_of(world: World, mine: T) -> T:
    """What the first rank has."""
    agreed = world.agree(mine)
    assert agreed is not None
    return agreed


def begin_alike(model: nn.Module, loss: object, world: World) -> None:
    """Gives all ranks the weights and buffers of the first one, of a ``loss`` that is a module as well.

    Raises UsageError for a model that exchanges something by itself.
    """
    if world.size == 1:
        return
    _require_no_exchange(model)
    roots = [model, *([loss] if isinstance(loss, nn.Module) else [])]
    weights = [each for root in roots for each in root.parameters()]
    buffers = [each for root in roots for each in root.buffers() if each.is_contiguous()]  # none that is expanded
    world.copy_first_([*weights, *buffers])


def require_same_data(world: World, data: Mapping[str, str]) -> None:
    """``data`` are the fingerprints of the data of this rank. Raises DataError where those of another rank differ."""
    _require_same(world.collect(dict(data)))


def _require_no_exchange(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            raise UsageError(
                "the model is wrapped in DistributedDataParallel, and gradients would be summed twice",
                remedy="hand over the module itself: the ranks are Trainwright's to synchronise",
            )
        if isinstance(module, nn.SyncBatchNorm):
            raise UsageError(
                "the model has SyncBatchNorm, which exchanges statistics in each forward pass, also where one rank "
                "alone tries the first batch",
                remedy="use BatchNorm in the model, and parallel.sync_batchnorm: true, which does the same in the "
                "steps of the training alone",
            )


def _require_same(prints: list[dict[str, str]]) -> None:
    """Fingerprints read in another way (slow data are read in part) are not compared."""
    for name, first in prints[0].items():
        for rank, other in enumerate(prints):
            theirs = other.get(name, "")
            if theirs != first and theirs.partition("(")[2] == first.partition("(")[2]:
                raise DataError(
                    f"rank {rank} has other data in data.{name} than rank 0: the same position names another sample",
                    remedy="make the dataset in the same way on every rank: a fixed seed for random splits, sorted "
                    "file names; the ranks share the samples by themselves",
                )
