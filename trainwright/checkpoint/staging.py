"""Staging: a copy of the state on the host, in buffers reused between saves, so that training need not wait."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from trainwright.checkpoint.shards import whole

Name = TypeVar("Name", bound=Hashable)


class Staging:
    """Host buffers by name. Allocating them takes far longer than copying into them, because the system maps each page
    first.

    1.5 GB on two CPU cores take 3 s to allocate, 0.1 s to fill. ``reserve`` allocates ahead of the first save.
    """

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}

    def reserve(self, tensors: Mapping[Name, Tensor]) -> None:
        """Allocate the buffers that ``copy`` of these tensors needs, and free all others."""
        self._buffers = {name: self._fitting(name, tensor) for name, tensor in tensors.items()}

    @torch.no_grad()
    def copy(self, tensors: Mapping[Name, Tensor]) -> dict[Name, Tensor]:
        """Return contiguous copies on the host, valid until the next call. Synchronizes with each device once.

        Tensors that are divided among ranks are gathered, one after the other.
        """
        self.reserve(tensors)
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}
        for name, tensor in tensors.items():
            self._buffers[name].copy_(whole(tensor.detach()), non_blocking=True)
        for device in devices:
            torch.cuda.synchronize(device)
        return {name: self._buffers[name] for name in tensors}

    def _fitting(self, name: Hashable, tensor: Tensor) -> Tensor:
        kept = self._buffers.get(name)
        if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            return kept
        pinned = tensor.device.type == "cuda"  # a copy from the device into pageable memory would wait for each tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned, device="cpu").zero_()


def on_host(tensors: Mapping[Name, Tensor]) -> dict[Name, Tensor]:
    """Return the tensors themselves if safetensors can write them unchanged, else copies."""
    hosted: dict[Name, Tensor] = {}
    taken: set[int] = set()  # safetensors rejects two tensors that share memory
    for name, tensor in tensors.items():
        tensor = whole(tensor.detach()).to("cpu").contiguous()
        memory = tensor.untyped_storage()
        if memory.nbytes() != tensor.nbytes or memory.data_ptr() in taken:
            tensor = tensor.clone()
        hosted[name] = tensor
        taken.add(memory.data_ptr())
    return hosted


def num_bytes(tensors: Mapping[Name, Tensor]) -> int:
    """Return the total size of all tensors."""
    return sum(tensor.nbytes for tensor in tensors.values())
