"""Digests of tensor rows: equal rows have equal digests, and different rows practically never do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from trainwright.recorder.plain_tensors import plain

MAX_COLUMNS_READ = 64
"""Number of evenly spread elements that are read from wider rows."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def row_digests(tensors: Sequence[Tensor]) -> Tensor | None:
    """Returns the digests, of shape (N,), over all tensors with as many rows as the first; None without rows."""
    rows = [each.detach() for each in plain(tensors) if each.dim() and each.numel()]
    total: Tensor | None = None
    for place, each in enumerate(rows[:4]):
        if len(each) == len(rows[0]) and each.itemsize in _INTEGERS:
            part = _digests(each)
            total = part if total is None else total + part * (2 * place + 1) * ~_counts_up(each)
    return total


def _counts_up(tensor: Tensor) -> Tensor:
    """Returns True if it numbers rows or groups of rows from 0 on: such positions are not part of a row's content.

    The result is a 0-d tensor, so that the host does not wait for the device.
    """
    if tensor.dim() > 1 or tensor.is_floating_point() or tensor.dtype == torch.bool:
        return torch.zeros((), dtype=torch.bool, device=tensor.device)
    return (tensor[0] == 0) & (tensor[1:] >= tensor[:-1]).all()


def _digests(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(len(tensor), -1) if tensor.dim() != 2 else tensor
    width = flat.shape[1]
    if width > MAX_COLUMNS_READ:
        flat = flat[:, :: width // MAX_COLUMNS_READ][:, :MAX_COLUMNS_READ]
    bits = flat.resolve_conj().resolve_neg().contiguous().view(_INTEGERS[flat.itemsize])
    return (bits * _weights(tensor.device)[: bits.shape[1]]).sum(1)  # int64, as the factors are


@cache
def _weights(device: torch.device) -> Tensor:
    """Returns odd random factors."""
    generator = torch.Generator().manual_seed(7)
    return (torch.randint(-(2**62), 2**62, (MAX_COLUMNS_READ,), generator=generator, device="cpu") * 2 + 1).to(device)


def is_continuous(tensors: Sequence[Tensor]) -> bool:
    """Returns True if the first rows contain fractional numbers, so that two samples are not equal by chance."""
    floats = [each.detach()[:4].double() for each in plain(tensors) if each.dim() and each.is_floating_point()]
    return any(bool((each != each.round()).sum() > 4) for each in floats)
