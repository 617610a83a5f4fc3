"""Checksums of the bits of tensors.

Equal tensors have equal checksums. A flipped bit changes the checksum by a power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainwright.checkpoint.codec import INTEGERS

Checksums = Callable[[], list[int]]
"""Returns the checksums; on a GPU it waits until they are computed."""


def no_checksums() -> list[int]:
    """Return no checksums."""
    return []


@torch.no_grad()
def start_checksums(tensors: Sequence[Tensor | None]) -> Checksums:
    """Start summing the bits of each tensor as integers, in one pass over the memory; 0 for None and for sparse
    tensors.

    On a GPU nothing waits until the returned function is called.
    """
    sums = [_sum(each) if each is not None else 0 for each in tensors]
    devices = {each.device for each in sums if isinstance(each, Tensor) and each.is_cuda}
    if not devices:
        known = [int(each) for each in sums]
        return lambda: known
    device = devices.pop()
    there = torch.stack([torch.as_tensor(each, device=device) for each in sums])
    here = torch.empty(len(there), dtype=torch.int64, pin_memory=True, device="cpu")
    here.copy_(there, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(device))

    def read() -> list[int]:
        copied.synchronize()
        numbers: list[int] = here.tolist()
        return numbers

    return read


def _sum(tensor: Tensor) -> Tensor | int:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.itemsize not in INTEGERS:
        return 0
    return tensor.view(INTEGERS[tensor.itemsize]).sum(dtype=torch.int64)
