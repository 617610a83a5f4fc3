"""Sums of an examined update's inputs and results. A replay with other sums shows that something was not recorded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainwright.recorder.ranks import own_part


@torch.no_grad()
def sums_of(tensors: Sequence[Tensor | None]) -> Tensor:
    """Returns norm and weighted sum of each tensor, shape (n, 2), float64 on the device of the first; NaN for None.

    The weights rise from 0 to 1, so that a change of sign or order changes the sum, also of gradients that add up to 0.
    """
    there = [own_part(t.detach()) for t in tensors if t is not None]
    dense = [_real(t.to_dense() if t.layout != torch.strided else t) for t in there]
    device = dense[0].device if dense else torch.device("cpu")
    sums = torch.full((len(tensors), 2), torch.nan, dtype=torch.float64, device=device)
    if dense:
        at = torch.tensor([n for n, t in enumerate(tensors) if t is not None], device=device)
        norms = torch.stack([each.to(device).double() for each in torch._foreach_norm(dense)])
        sums[at] = torch.stack([norms, torch.stack([_weighted(t).to(device) for t in dense])], dim=1)
    return sums


def _real(tensor: Tensor) -> Tensor:
    """Returns a complex tensor as pairs of real numbers."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _weighted(tensor: Tensor) -> Tensor:
    ramp = torch.linspace(0, 1, tensor.numel(), device=tensor.device, dtype=torch.float32)
    return (tensor.reshape(-1) * ramp).sum(dtype=torch.float64)
