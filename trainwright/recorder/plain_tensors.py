"""Tests whether a tensor is dense and can be read, and reads properties that tensors of any kind have."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Returns True if a tensor has an element at each position: it is not sparse, nested or quantized."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def is_plain(tensor: Tensor) -> bool:
    """Returns True if the elements can be read: it has memory, is dense, and has no custom dispatch."""
    return is_dense(tensor) and not tensor.is_meta and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def plain(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns the tensors whose elements can be read."""
    return [each for each in tensors if is_plain(each)]


def num_bytes(tensor: Tensor) -> int:
    """Returns the bytes of the elements; for a sparse COO tensor, of indices and values; 0 for other sparse layouts."""
    try:
        return tensor.nbytes
    except RuntimeError:
        return sum(num_bytes(each) for each in _parts(tensor))


def _parts(tensor: Tensor) -> list[Tensor]:
    return [tensor._indices(), tensor._values()] if tensor.layout is torch.sparse_coo else []


def version_of(tensor: Tensor) -> int:
    """Returns the version counter; 0 for an inference tensor, which nothing writes to outside of inference mode."""
    return 0 if tensor.is_inference() else tensor._version
