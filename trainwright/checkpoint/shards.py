"""Tensors that are divided among ranks (torch's DTensor): a rank's part, the whole, and a whole cut into parts.

What makes them takes most of a second to import, so it is asked only where somebody has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from trainwright.distributed.group import Ranks

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


_ORDINARY = (Tensor, nn.Parameter)


def is_sharded(model: nn.Module) -> TypeGuard[FSDPModule]:
    """Whether FSDP divides its weights among ranks."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def is_divided(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether ranks hold parts of it, or copies that are kept alike."""
    if type(tensor) in _ORDINARY:  # in each step for each weight
        return False
    divided = sys.modules.get("torch.distributed.tensor")
    return divided is not None and isinstance(tensor, divided.DTensor)


def units(model: nn.Module) -> Iterator[FSDPModule]:
    """The modules of a model whose weights FSDP gathers together, from the outside in."""
    for module in model.modules():
        if is_sharded(module):
            yield module


def holds_parts(model: nn.Module) -> bool:
    """Whether ranks hold parts of its weights, by FSDP or because they divide its layers."""
    return any(is_divided(parameter) for parameter in model.parameters())


def divides_layers(model: nn.Module) -> bool:
    """Whether ranks divide layers of it (tensor parallelism), and so compute with the same samples."""
    gathered = {id(p) for unit in units(model) if isinstance(unit, nn.Module) for p in unit.parameters()}
    for parameter in model.parameters():
        if is_divided(parameter):
            axes = [placement for placement in parameter.placements if not placement.is_replicate()]
            if len(axes) > 1 or (axes and id(parameter) not in gathered):
                return True
    return False


def reshard(model: nn.Module) -> None:
    """Gives back the whole weights that a forward pass without a backward pass leaves: they may be out of date."""
    for unit in units(model):
        unit.reshard()


def local(tensor: Tensor) -> Tensor:
    """This rank's part, in the same memory; of an ordinary tensor, itself."""
    if not is_divided(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def locals_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's part of each."""
    return [local(tensor) for tensor in tensors]


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """The whole of a divided tensor. Every rank must ask for the same ones in the same order."""
    return tensor.full_tensor() if is_divided(tensor) else tensor


def divided_like(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` divided as ``like`` is: this rank's part of it is a view, so that of a mapped file no more is read.

    Where ``like`` is not divided, or has another shape, the tensor itself.
    """
    if not is_divided(like) or is_divided(tensor) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh, part = like.device_mesh, tensor
    # FSDP divides last what is divided by layers already, and writes that as strided, in the place of its axis
    for axis in sorted(range(mesh.ndim), key=lambda axis: isinstance(like.placements[axis], _StridedShard)):
        placement = like.placements[axis]
        if not placement.is_replicate():
            part = _chunk(part, mesh.size(axis), mesh.get_local_rank(axis), placement.dim)  # type: ignore[attr-defined]
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def row_of_each_rank(tensor: Tensor, world: Ranks) -> Tensor:
    """Tensors of one shape of which every rank has its own, as one with a row for each; ``whole`` gathers it."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(world.group, tensor.device.type)
    return DTensor.from_local(tensor[None], mesh, [Shard(0)], run_check=False)


def _chunk(tensor: Tensor, count: int, index: int, dim: int) -> Tensor:
    """As torch.chunk, whose last chunks may be smaller, or missing: those are empty here."""
    size = tensor.shape[dim]
    each = -(-size // count)
    begin = min(index * each, size)
    return tensor.narrow(dim, begin, min(each, size - begin))
