"""Tensor parallelism: the layers of a model divided among the ranks of one mesh axis, by torch's styles."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainwright.distributed.split_plan import SplitPlan, ties_of
from trainwright.errors import UsageError
from trainwright.recipe.schema import TensorStyle


def apply_tensor_parallelism(model: nn.Module, mesh: DeviceMesh, plan: SplitPlan, *, sequence: bool) -> None:
    """Convert the weights that ``plan`` names to DTensors of ``mesh`` (1-D), in place; tied weights stay one weight.

    Each rank gets its part of the first rank's weights. With ``sequence``, activations between attention and
    feed-forward layers are also divided, along the sequence.
    """
    ties, frozen = ties_of(model), {name for name, each in model.named_parameters() if not each.requires_grad}
    for name, style in plan.items():
        for each in _styles(style, model.get_submodule(name), mesh, sequence=sequence):
            parallelize_module(model.get_submodule(name), mesh, each)
    for places in ties:
        first, *_ = (getattr(model.get_submodule(owner), name) for owner, name in places)
        for owner, name in places:
            setattr(model.get_submodule(owner), name, first)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)  # some styles of torch reset it


def overlap_collectives(mesh: DeviceMesh) -> None:
    """Let torch.compile overlap all-gathers and reduce-scatters of ``mesh`` with matrix products, in this process.

    As in torchtitan. torch 2.13 and 2.14 call the second setting deprecated, but their compiler still needs it.
    """
    from torch._inductor import config  # slow to import

    config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        symmetric_memory.enable_symm_mem_for_group(mesh.get_group().group_name)


def _styles(style: TensorStyle, module: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> Iterator[ParallelStyle]:
    """Yield torch's styles. Between the divided layers, activations are full, or parts along the sequence."""
    between = Shard(1) if sequence else Replicate()
    if style == "column":
        yield ColwiseParallel(input_layouts=between)
    elif style == "column_gathered":
        yield ColwiseParallel(input_layouts=between, output_layouts=Replicate())
    elif style == "row" and isinstance(module, nn.Embedding):
        yield RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    elif style == "row":
        yield RowwiseParallel(output_layouts=between)
    elif style == "input":
        is_layer = isinstance(module, nn.Linear)  # its weights are no DTensors
        yield PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate(), use_local_output=is_layer)
    elif style == "per_head":
        yield SequenceParallel(sequence_dim=2, use_local_output=True)
    elif style == "sequence" and sequence:
        yield SequenceParallel(use_local_output=True)
    elif style == "scatter" and sequence:
        module.register_forward_pre_hook(_require_equal_parts(mesh.size()))
        yield PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)


def _require_equal_parts(ranks: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def check(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        length = inputs[0].shape[1]
        if length % ranks:
            raise UsageError(
                f"parallel.sequence: {length} positions cannot be divided among {ranks} ranks",
                remedy=f"pad samples to a multiple of {ranks} positions, or leave parallel.sequence out",
            )

    return check
