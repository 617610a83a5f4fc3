"""Sums of an examined update's inputs and results. A replay with other sums shows that something was not recorded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainwright.recorder.ranks import local_part


@torch.no_grad()
def sums_of(tensors: Sequence[Tensor | None]) -> Tensor:
    """Returns norm and weighted sum of each tensor, shape (n, 2), float64 on the device of the first; NaN for None.

    The weights rise from 0 to 1, so that a change of sign or order changes the sum, also of gradients that add up to 0.
    """
    there = [local_part(t.detach()) for t in tensors if t is not None]
    dense = [_real(t.to_dense() if t.layout != torch.strided else t) for t in there]
    device = dense[0].device if dense else torch.device("cpu")
    sums = torch.full((len(tensors), 2), torch.nan, dtype=torch.float64, device=device)
    if dense:
        at = torch.tensor([n for n, t in enumerate(tensors) if t is not None], device=device)
        norms = torch.stack([each.to(device).double() for each in torch._foreach_norm(dense)])
        weighted = dict.fromkeys(range(len(dense)), sums)
        ramp = torch.empty(0)
        for n in sorted(weighted, key=lambda n: dense[n].numel()):  # equal sizes share a ramp
            t = dense[n]
            if len(ramp) != t.numel() or ramp.device != t.device:
                ramp = torch.linspace(0, 1, t.numel(), device=t.device, dtype=torch.float32)
            weighted[n] = (t.reshape(-1) * ramp).sum(dtype=torch.float64).to(device)
        sums[at] = torch.stack([norms, torch.stack(list(weighted.values()))], dim=1)
    return sums


def _real(tensor: Tensor) -> Tensor:
    """Returns a complex tensor as pairs of real numbers."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
