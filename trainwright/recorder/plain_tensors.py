"""Tensors of any kind: which of them lie in memory row by row, and what all of them can be asked."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether it has a shape, and an element at each place: it is not sparse, nested or quantised."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def is_plain(tensor: Tensor) -> bool:
    """Whether its elements can be read: it has a memory, is dense, and no class of its own computes with it."""
    return is_dense(tensor) and not tensor.is_meta and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def plain(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those that can be measured."""
    return [each for each in tensors if is_plain(each)]


def num_bytes(tensor: Tensor) -> int:
    """Of its elements; of a sparse tensor those of its indices and values."""
    try:
        return tensor.nbytes
    except RuntimeError:
        return sum(num_bytes(each) for each in _parts(tensor))


def _parts(tensor: Tensor) -> list[Tensor]:
    return [tensor._indices(), tensor._values()] if tensor.layout is torch.sparse_coo else []


def version_of(tensor: Tensor) -> int:
    """How often it was written to; 0 for one that was made in inference mode, which nothing writes to outside of it."""
    return 0 if tensor.is_inference() else tensor._version


def rows_of(tensor: Tensor) -> int:
    """Its rows; 1 of one without dimensions."""
    return tensor.size(0) if tensor.dim() else 1
