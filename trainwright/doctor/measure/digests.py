"""Rows of tensors as integers: equal rows have equal digests, and others practically never."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from trainwright.recorder.plain_tensors import plain

COLUMNS = 64
"""Of a wider row so many elements, evenly spread, are read."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def row_digests(tensors: Sequence[Tensor]) -> Tensor | None:
    """The digests (N,) of the rows of all tensors that have as many as the first with a dimension; None without one."""
    rows = [each.detach() for each in plain(tensors) if each.dim() and each.numel()]
    total: Tensor | None = None
    for place, each in enumerate(rows[:4]):
        if len(each) == len(rows[0]) and each.itemsize in _INTEGERS:
            part = _digests(each)
            total = part if total is None else total + part * (2 * place + 1) * ~_counts_up(each)
    return total


def _counts_up(tensor: Tensor) -> Tensor:
    """Whether it numbers rows or groups of rows from 0 on: a position in the batch is no part of a row's content.

    A 0-d tensor, so that nobody waits for a device.
    """
    if tensor.dim() > 1 or tensor.is_floating_point() or tensor.dtype == torch.bool:
        return torch.zeros((), dtype=torch.bool, device=tensor.device)
    return (tensor[0] == 0) & (tensor[1:] >= tensor[:-1]).all()


def _digests(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(len(tensor), -1) if tensor.dim() != 2 else tensor
    width = flat.shape[1]
    if width > COLUMNS:
        flat = flat[:, :: width // COLUMNS][:, :COLUMNS]
    bits = flat.resolve_conj().resolve_neg().contiguous().view(_INTEGERS[flat.itemsize])
    return (bits * _weights(tensor.device)[: bits.shape[1]]).sum(1)  # as int64, which the factors are


@cache
def _weights(device: torch.device) -> Tensor:
    """Odd random factors."""
    generator = torch.Generator().manual_seed(7)
    return (torch.randint(-(2**62), 2**62, (COLUMNS,), generator=generator, device="cpu") * 2 + 1).to(device)


def is_continuous(tensors: Sequence[Tensor]) -> bool:
    """Whether some row of the first rows holds numbers that are not whole: two samples are then not equal by chance."""
    floats = [each.detach()[:4].double() for each in plain(tensors) if each.dim() and each.is_floating_point()]
    return any(bool((each != each.round()).sum() > 4) for each in floats)
