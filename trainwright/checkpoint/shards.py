"""Tensors that are divided among ranks (torch's DTensor): local parts, full tensors, and their conversion.

Importing DTensor takes most of a second, so these functions use it only if it has been imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from trainwright.checkpoint.stored import Box, StoredTensor

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


_ORDINARY = (Tensor, nn.Parameter)


def is_sharded(model: nn.Module) -> TypeGuard[FSDPModule]:
    """Return True if FSDP divides the weights of the model among ranks."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def is_divided(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return True if ranks hold parts of the tensor, or replicas of it."""
    if type(tensor) in _ORDINARY:  # runs in each step for each weight
        return False
    divided = sys.modules.get("torch.distributed.tensor")
    return divided is not None and isinstance(tensor, divided.DTensor)


def units(model: nn.Module) -> Iterator[FSDPModule]:
    """Yield the modules of a model whose weights FSDP gathers together, outermost first."""
    for module in model.modules():
        if is_sharded(module):
            yield module


def holds_parts(model: nn.Module) -> bool:
    """Return True if FSDP or tensor parallelism divides the weights among ranks."""
    return any(is_divided(parameter) for parameter in model.parameters())


def divides_layers(model: nn.Module) -> bool:
    """Return True if tensor parallelism divides layers, so that its ranks compute with the same samples."""
    gathered = {id(p) for unit in units(model) if isinstance(unit, nn.Module) for p in unit.parameters()}
    for parameter in model.parameters():
        if is_divided(parameter):
            axes = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
            if "expert" in (names := parameter.device_mesh.mesh_dim_names or ()):
                axes.remove(names.index("expert"))  # the ranks along this axis have different samples
            if len(axes) > 1 or (axes and id(parameter) not in gathered):
                return True
    return False


def reshard(model: nn.Module) -> None:
    """Free the full weights left by a forward pass without a backward pass, because they may be out of date."""
    for unit in units(model):
        unit.reshard()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part, which shares memory with ``tensor``. An ordinary tensor is returned unchanged."""
    if not is_divided(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def locals_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's part of each tensor."""
    return [local(tensor) for tensor in tensors]


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor. Every rank must call this for the same tensors in the same order."""
    return tensor.full_tensor() if is_divided(tensor) else tensor


def divided_like(tensor: Tensor | StoredTensor, like: Tensor) -> Tensor:
    """Return ``tensor`` divided as ``like`` is. Only the local part is read from files.

    Returns the full tensor if ``like`` is not divided, or has another shape.
    """
    if not is_divided(like) or tensor.shape != like.shape or (isinstance(tensor, Tensor) and is_divided(tensor)):
        return tensor.whole() if isinstance(tensor, StoredTensor) else tensor
    from torch.distributed.tensor import DTensor

    box = _local_box(like)
    part = (
        tensor.read(box)
        if isinstance(tensor, StoredTensor)
        else tensor[tuple(slice(begin, begin + size) for begin, size in box)]
    )
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _local_box(tensor: DTensor) -> Box:
    """Return this rank's part of the full tensor as (begin, size) of each dimension."""
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = tensor.device_mesh
    box = [(0, size) for size in tensor.shape]
    # FSDP divides the parts that tensor parallelism makes, and marks its placement as strided, so its axis is last
    for axis in sorted(range(mesh.ndim), key=lambda axis: isinstance(tensor.placements[axis], _StridedShard)):
        placement = tensor.placements[axis]
        if not placement.is_replicate():
            dim: int = placement.dim  # type: ignore[attr-defined]
            box[dim] = _chunk(*box[dim], mesh.size(axis), mesh.get_local_rank(axis))
    return box


def _chunk(begin: int, size: int, count: int, index: int) -> tuple[int, int]:
    """Return (begin, size) of one chunk, as torch.chunk divides a range. The last chunks may be smaller or empty."""
    each = -(-size // count)
    skipped = min(index * each, size)
    return begin + skipped, min(each, size - skipped)
