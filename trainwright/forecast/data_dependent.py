"""Answers for operators that need values, which fake tensors lack: a number, or the largest shape there can be."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from trainwright.forecast.fake_tensors import UNTRACEABLE, untraceable

aten = torch.ops.aten


def without_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the operator; where that needs values, gives what costs most.

    A number that is read (``.item()``) is False or 1: a step is not skipped, a norm is clipped, a weight counts.
    ``nonzero`` and masks find every element. Raises UsageError for other operators whose result depends on values.
    """
    try:
        out = func(*args, **kwargs)
    except UNTRACEABLE as error:
        packet = func._overloadpacket
        if packet is aten._local_scalar_dense:
            return _number(args[0].dtype)
        if packet is aten.nonzero:
            return _every(args[0])
        if packet is aten.masked_select:
            return args[0].new_empty(prod(torch.broadcast_shapes(args[0].shape, args[1].shape)))  # type: ignore[no-untyped-call]
        if packet in (aten.index, aten.index_put, aten.index_put_):
            return func(args[0], _indices(args[1]), *args[2:], **kwargs)
        raise untraceable(error) from None
    if func._overloadpacket is aten.native_group_norm_backward:
        return _in_dtype_of(args[1], out)
    return out


def _in_dtype_of(x: Tensor, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The gradient of ``x`` has its dtype; fake tensors give it that of the weight, which is fp32 under autocast."""
    first = grads[0]
    return (first if first is None or first.dtype is x.dtype else first.to(x.dtype), *grads[1:])


def _number(dtype: torch.dtype) -> bool | int | float:
    if dtype is torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


def _every(mask: Tensor) -> Tensor:
    return mask.new_empty((mask.numel(), mask.dim()), dtype=torch.int64)


def _indices(given: list[Tensor | None]) -> list[Tensor | None]:
    """Masks as positions."""
    found: list[Tensor | None] = []
    for index in given:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found += [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.dim())]
        else:
            found.append(index)
    return found
