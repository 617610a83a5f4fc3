"""A digest of the batches of an epoch so far, by which a second reading is compared with the first."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from trainwright.data.collation import Batch

_NUMPY_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
"""Dtypes that NumPy also has; tensors of others are compared by their bytes."""
MAX_VALUES_COMPARED = 512
"""Maximum number of values per tensor in a digest, spread evenly: some microseconds per tensor of any size."""


def digest_with(before: str, data: Batch) -> str:
    """Return the digest of the previous batches and this one."""
    parts = [before.encode()]
    _add(parts, data, 0)
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


def _add(parts: list[bytes], data: object, depth: int) -> None:
    """Add the compared parts of a batch.

    A tensor on a GPU adds only its shape, because its values would cost a sync.
    """
    if isinstance(data, Tensor):
        parts.append(_kind_of(data.dtype, data.shape))
        if data.is_cpu and data.layout == torch.strided and data.numel():
            parts.append(_some_values(data))
    elif isinstance(data, tuple | list):
        parts.append(str(len(data)).encode())
        for each in data[:MAX_VALUES_COMPARED]:
            _add(parts, each, depth)
    elif isinstance(data, Mapping):
        for key, value in data.items():
            parts.append(repr(key).encode())
            _add(parts, value, depth)
    elif isinstance(data, str | bytes | bool | int | float | None):
        parts.append(repr(data).encode())
    elif depth < 4 and hasattr(data, "__dict__"):  # a batch of graphs, or any class of the user's
        _add(parts, vars(data), depth + 1)


@lru_cache(maxsize=256)
def _kind_of(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{dtype}{tuple(shape)}".encode()


def _some_values(tensor: Tensor) -> bytes:
    """Return the bytes of some values, without copying the others in any memory layout."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    if plain.dtype not in _NUMPY_DTYPES:
        plain = plain.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()])
    flat = plain.numpy().ravel(order="K")
    return flat[:: -(-len(flat) // MAX_VALUES_COMPARED)].tobytes()
