"""Results of operators that depend on values, which fake tensors lack: a number, or the largest shape."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainwright.plan.trace.fake_tensors import UNTRACEABLE, untraceable
from trainwright.plan.trace.operator_call import OpArgs, OpKwargs, OpResult

aten = torch.ops.aten


def call_without_values(op: OpOverload, args: OpArgs, kwargs: OpKwargs) -> OpResult:
    """Call the operator. If the result depends on values, return the most expensive one.

    A number that is read (``.item()``) is False or 1: a step is not skipped, a norm is clipped, a weight counts.
    ``nonzero`` and masks select every element. Raises UsageError for other operators whose result depends on values.
    """
    packet = op._overloadpacket
    if packet is aten._grouped_mm:  # fake tensors accept only bf16, kernels also other types
        return _grouped_product(*args, **kwargs)
    try:
        result = op(*args, **kwargs)
    except UNTRACEABLE as error:
        if packet is aten._local_scalar_dense:
            return _number(args[0].dtype)
        if packet is aten.nonzero:
            return _every_position(args[0])
        if packet is aten.masked_select:
            return args[0].new_empty(prod(torch.broadcast_shapes(args[0].shape, args[1].shape)))  # type: ignore[no-untyped-call]
        if packet in (aten.index, aten.index_put, aten.index_put_):
            return op(args[0], _masks_as_positions(args[1]), *args[2:], **kwargs)
        raise untraceable(error) from None
    if packet is aten.native_group_norm_backward:
        return _in_dtype_of(args[1], result)
    return result


def _grouped_product(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: object = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return the product of rows (N, I) and matrices (E, I, O): (N, O).

    For two matrices whose common dimension is divided into E groups, the result is (E, I, O).
    """
    groups = [len(offs)] if offs is not None and a.dim() == b.dim() == 2 else []
    groups = [len(a)] if a.dim() == b.dim() == 3 else groups
    return a.new_empty(*groups, a.shape[-2], b.shape[-1], dtype=out_dtype)


def _in_dtype_of(x: Tensor, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Give the gradient of ``x`` its dtype; fake tensors use the weight's, which is fp32 under autocast."""
    first = grads[0]
    return (first if first is None or first.dtype is x.dtype else first.to(x.dtype), *grads[1:])


def _number(dtype: torch.dtype) -> bool | int | float:
    if dtype is torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


def _every_position(mask: Tensor) -> Tensor:
    return mask.new_empty((mask.numel(), mask.dim()), dtype=torch.int64)


def _masks_as_positions(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Replace each mask among the indices by one index of positions for each of its dimensions."""
    positions: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            positions += [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.dim())]
        else:
            positions.append(index)
    return positions
