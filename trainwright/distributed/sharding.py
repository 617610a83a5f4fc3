"""Divides the weights of a model among ranks: torch's FSDP2 (fully_shard), one unit for each block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp
from torch.distributed.tensor import Shard

from trainwright.distributed.split_plan import expert_modules, expert_weights
from trainwright.errors import UsageError

_16_BIT = (torch.float16, torch.bfloat16)


def shard_model(model: nn.Module, mesh: DeviceMesh, *, zero: int = 3, of_experts: DeviceMesh | None = None) -> int:
    """Divide the parameters of ``model`` among the ranks of the last axis of ``mesh``; return the number of units.

    Along the first of two axes, ranks hold the same parts (HSDP). With ``zero`` 3 the full weights of a block exist
    while it computes; with 1 and 2 from its forward pass to its backward pass. Gradients are summed, not averaged, in
    at least float32. A parameter without dimensions is not divided. Every rank must hold the same weights before.
    Experts that ``divide_experts`` has divided are sharded along ``of_experts``, whose ranks have the same experts.

    Raises:
        UsageError: A block has weights of several dtypes.
    """
    placement = None if of_experts is None else _placement_of_experts(model, of_experts)
    units = [*units_of(model), model]
    ignored = {p for p in model.parameters() if p.dim() == 0}
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()  # FSDP supports no other
    taken: set[nn.Module] = set()
    for unit in units:
        own = [p for m in unit.modules() if m not in taken for p in m.parameters(recurse=False) if p not in ignored]
        taken.update(unit.modules())
        policy = MixedPrecisionPolicy(reduce_dtype=_reduced_in(unit, own), cast_forward_inputs=False)
        keeps = zero < 3 or unit is model
        sharded = fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=not keeps,
            shard_placement_fn=placement,
            mp_policy=policy,
            ignored_params=ignored,
        )
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_reduce_scatter_unused_params(True)  # another rank may use them
    return len(units)


def _placement_of_experts(model: nn.Module, mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """Return FSDP's placement function: weights of experts are sharded along ``mesh``, all others by default (None).

    The sharded dimension is the first of an expert's that the ranks divide evenly; without one, 0 (the experts).
    """
    experts = {weight for module in expert_modules(model) for weight in expert_weights(module)}
    info = fsdp.FSDPMeshInfo(mesh, 0) if mesh.ndim == 1 else fsdp.HSDPMeshInfo(mesh, 1, 0)
    ranks = mesh.size(mesh.ndim - 1)

    def placement(weight: nn.Parameter) -> Any:
        if weight not in experts:
            return None
        even = (dim for dim in range(1, weight.dim()) if weight.shape[dim] % ranks == 0)
        return fsdp.ShardPlacementResult(Shard(next(even, 0)), info)

    return placement


def require_several_meshes() -> None:
    """Raise UsageError if this version of torch shards all weights of a block over the same ranks."""
    if not hasattr(fsdp, "ShardPlacementResult"):
        raise UsageError(
            f"parallel.expert and parallel.shard together need torch 2.13 or newer; this is {torch.__version__}",
            remedy="install it, or use parallel.expert with parallel.replicate",
        )


def units_of(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules with parameters in an nn.ModuleList or nn.Sequential, each once.

    A module that shares a parameter with others is excluded, because both must be gathered together.
    """
    blocks = list(dict.fromkeys(_blocks(model)))
    owners: dict[Tensor, set[nn.Module]] = {}
    for owner in (*blocks, model):
        inside = set(chain.from_iterable(b.modules() for b in blocks)) if owner is model else set()
        for module in owner.modules():
            if module not in inside:
                for parameter in module.parameters(recurse=False):
                    owners.setdefault(parameter, set()).add(owner)
    return [block for block in blocks if all(owners[p] == {block} for p in block.parameters())]


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential) or not is_list:
            yield from _blocks(child)
        elif any(True for _ in child.parameters()):
            yield child


def _reduced_in(unit: nn.Module, own: list[nn.Parameter]) -> torch.dtype | None:
    """Return the dtype in which gradients are summed; None: the dtype of the gradients."""
    dtypes = {p.dtype for p in own if p.requires_grad}
    if len(dtypes) > 1:
        raise UsageError(
            f"parallel.shard: the weights of a {type(unit).__name__} are of {' and '.join(sorted(map(str, dtypes)))}",
            remedy="give all trained weights one dtype: model.float(); bf16 is computed by precision: bf16",
        )
    return torch.float32 if dtypes & set(_16_BIT) else None
