"""The fingerprint of a dataset identifies the data of a run, and is cheap enough to compute at every start."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

WHOLE_ITEMS = 256  # datasets up to this size are read whole
SAMPLED_ITEMS = 64
WHOLE_BYTES = 2**30  # tensors up to this size are hashed whole: about a second


@dataclass(frozen=True)
class Fingerprint:
    """``sha256`` (hex) and ``how`` much of the data it covers, in words."""

    sha256: str
    how: str


class Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


class Items(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, position: int, /) -> object: ...


def fingerprint(dataset: object) -> Fingerprint:
    """Returns a hash that is equal for equal data; ``how`` says how much of the data it covers.

    It covers the first of these that applies: the dataset's own ``content_sha256()``; all bytes of a TensorDataset; the
    type of a dataset without length, which is not read; all items of a small dataset; type, length and a fixed sample
    of items. The global generators are seeded while items are read and restored after it, so augmented items give the
    same hash each time.
    """
    if hasattr(dataset, "content_sha256"):
        return Fingerprint(dataset.content_sha256(), "the whole content")
    digest = hashlib.sha256()
    _add(digest, type(dataset).__module__ + "." + type(dataset).__qualname__)
    if isinstance(dataset, TensorDataset) and sum(each.nbytes for each in dataset.tensors) <= WHOLE_BYTES:
        _add(digest, dataset.tensors)
        return Fingerprint(digest.hexdigest(), "the whole content")
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return Fingerprint(digest.hexdigest(), "the type only: this dataset cannot be read without using it up")
    size = len(dataset)
    _add(digest, size)
    positions = _sample(size)
    with _fixed_random_numbers():
        for position in positions:
            _add(digest, position)
            _add(digest, _item(dataset, position))
    how = "all items" if len(positions) == size else f"the type, the length and {len(positions)} of {size} items"
    return Fingerprint(digest.hexdigest(), how)


def _sample(size: int) -> list[int]:
    """Returns all positions of a small dataset; else the first, the last and a fixed choice between."""
    if size <= WHOLE_ITEMS:
        return list(range(size))
    words = np.random.Philox(key=size).random_raw(SAMPLED_ITEMS - 2)
    return sorted({0, size - 1, *(int(word) % size for word in words)})


def _item(dataset: Items, position: int) -> object:
    """Returns the item, or the name of the error that reading it raises; training reports that error in full."""
    try:
        return dataset[position]
    except Exception as error:
        return f"raises {type(error).__name__}"


@contextmanager
def _fixed_random_numbers() -> Iterator[None]:
    """Seeds the global generators of Python, NumPy and torch with 0 inside the context and restores them after it.

    Only the CPU generator of torch is seeded: ``torch.manual_seed`` would also change those of devices.
    """
    python, legacy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    has_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = torch.cuda.get_rng_state_all() if has_device else []
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.set_rng_state(cpu)
        if has_device:
            torch.cuda.set_rng_state_all(devices)


def _add(digest: Digest, value: object) -> None:
    """Adds a value: type and size before the content, so that different structures give different bytes."""
    match value:
        case Tensor():
            _add_tensor(digest, value)
        case np.ndarray() | np.generic() if value.dtype != object:
            _add_bytes(digest, f"numpy {value.dtype.str} {value.shape}", value.tobytes())
        case bytes() | bytearray():
            _add_bytes(digest, "bytes", bytes(value))
        case str():
            _add_bytes(digest, "str", value.encode("utf-8", "surrogatepass"))
        case Mapping():
            _add_bytes(digest, f"mapping {len(value)}", b"")
            for key in sorted(value, key=repr):
                _add(digest, key)
                _add(digest, value[key])
        case list() | tuple():
            _add_bytes(digest, f"sequence {len(value)}", b"")
            for each in value:
                _add(digest, each)
        case _ if is_dataclass(value) and not isinstance(value, type):
            _add(digest, {field.name: getattr(value, field.name) for field in fields(value)})
        case _ if hasattr(value, "tobytes") and hasattr(value, "mode"):  # a PIL image
            _add_bytes(digest, f"image {value.mode} {getattr(value, 'size', ())}", value.tobytes())
        case _:  # int, float, None, bool ... and unknown types, without their address in memory
            _add_bytes(digest, type(value).__name__, re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value)).encode())


def _add_tensor(digest: Digest, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        _add_bytes(digest, "tensor", repr(tensor).encode())
        return
    raw = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    _add_bytes(digest, f"tensor {tensor.dtype} {tuple(tensor.shape)}", raw.numpy().tobytes())


def _add_bytes(digest: Digest, kind: str, content: bytes) -> None:
    digest.update(f"{kind} {len(content)}:".encode())
    digest.update(content)
