"""Copies tensors out of shared memory. DataLoader workers create such tensors, each of which is an open file."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from trainwright.recorder.plain_tensors import is_plain

MUCH_LARGER = 4
"""Maximum size of the storage of a worker's tensor / size of the tensor. In a larger storage, the tensor is a view of
a dataset, and all such views share one file."""


def is_of_worker(tensor: Tensor) -> bool:
    """Returns True if a plain tensor has a shared storage of about its own size."""
    if not tensor.is_cpu or not is_plain(tensor):
        return False
    storage = tensor.untyped_storage()
    if not storage.is_shared() or tensor.is_conj() or tensor.is_neg():
        return False
    return storage.nbytes() <= MUCH_LARGER * tensor.nbytes


class PrivateCopies:
    """Copies storages into private memory, each once, so that tensors that share memory do so in the copy."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, int], tuple[StorageWeakRef, torch.UntypedStorage]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the copy of a tensor. Offset and strides are kept, so that kernels sum in the same order."""
        shared = tensor.untyped_storage()
        reference = StorageWeakRef(shared)  # type: ignore[no-untyped-call]  # its address is not used again meanwhile
        key = int(reference.cdata), tensor._version
        if key not in self._copies:
            private = torch.UntypedStorage(shared.nbytes())  # type: ignore[no-untyped-call]
            private.copy_(shared)
            self._copies[key] = reference, private
        copy = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return copy.set_(self._copies[key][1], tensor.storage_offset(), tensor.shape, tensor.stride())

    def forget(self) -> None:
        self._copies.clear()
