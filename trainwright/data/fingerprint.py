"""The fingerprint of a dataset identifies the data of a run, and is fast enough to compute at every start."""

from __future__ import annotations

import hashlib
import random
import re
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from trainwright.data.fork import Begin, TooSlowError, is_of_cuda, read_in_fork
from trainwright.data.read_files import Files

MAX_ITEMS_FULLY_READ = 256  # datasets up to this size are read completely
SAMPLED_ITEMS = 64  # items that are read of a larger dataset
MAX_BYTES_FULLY_HASHED = 2**30  # tensors up to this size are hashed completely, in about a second
MAX_READING_S = 2.0
"""Estimated total time, in seconds, above which no further items are read."""
LIMIT_S = 10.0
"""Time limit for reading, in seconds. If not even the first items are read in time, the hash covers none."""
_GROWTH = 4
_CHECK_COUNTS = (4, 16, 64)
"""Numbers of items after which to check if there is time for ``_GROWTH`` times as many.

Only a few different numbers, because only fingerprints of equally many items can be compared.
"""


@dataclass(frozen=True)
class Fingerprint:
    """``sha256`` (hex), and ``how`` much of the data it covers, as text."""

    sha256: str
    how: str


def fingerprint(dataset: object, left_out: Collection[int] = ()) -> Fingerprint:
    """Return a hash that is equal for equal data; ``how`` describes the part of the data it covers.

    It covers the first of these that applies: the dataset's ``content_sha256()``; all bytes of a TensorDataset of at
    most 1 GiB; the names and sizes of ``tw.files``; the type of a dataset without length, which is not read; all items
    of a small dataset; type, length and a fixed sample of items. Items in ``left_out`` are not read, and fewer items
    are read if that is slow. On Linux another process reads them. The global generators are seeded for each item, so
    augmented items have the same hash each time.

    Raises:
        DataError: An item terminates the process that reads it.
    """
    if hasattr(dataset, "content_sha256"):
        return Fingerprint(dataset.content_sha256(), "the whole content")
    digest = hashlib.sha256()
    _add(digest, type(dataset).__module__ + "." + type(dataset).__qualname__)
    if isinstance(dataset, TensorDataset) and sum(each.nbytes for each in dataset.tensors) <= MAX_BYTES_FULLY_HASHED:
        _add(digest, dataset.tensors)
        return Fingerprint(digest.hexdigest(), "the whole content")
    if isinstance(shards := getattr(dataset, "files", None), Files):
        _add(digest, {Path(path).name: size for path, size in zip(shards.paths, shards.sizes, strict=True)})
        how = f"the names of {len(shards.paths)} files and the numbers of their samples, not what is in them"
        return Fingerprint(digest.hexdigest(), how)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return Fingerprint(digest.hexdigest(), "the type only: this dataset cannot be read without using it up")
    size = len(dataset)
    _add(digest, size)
    found = [Fingerprint(digest.hexdigest(), f"type and length only: none of {size} items could be read in time")]

    def read(begin: Begin) -> Iterator[Fingerprint]:
        return _read(dataset, digest, left_out, begin)

    with suppress(TooSlowError):
        found.extend(read_in_fork(read, limit_s=LIMIT_S))
    return found[-1]


def _read(dataset: Any, digest: hashlib._Hash, left_out: Collection[int], begin: Begin) -> Iterator[Fingerprint]:
    """Yield fingerprints of ever more items."""
    size, begin_s = len(dataset), time.perf_counter()
    wanted = _sample(size)
    positions = [position for position in wanted if position not in left_out]
    spared = "" if len(positions) == len(wanted) else ", without those in quarantine"
    for number, position in enumerate(positions, start=1):
        begin(position)
        item = _item(dataset, position)
        if isinstance(item, _OnDevice):
            yield Fingerprint(digest.hexdigest(), f"type and length only: the {size} items are on a GPU")
            return
        _add(digest, (position, item))
        if number == len(positions):
            how = (
                f"all {size} items"
                if len(wanted) == size
                else f"the type, the length and {len(wanted)} of {size} items"
            )
            yield Fingerprint(digest.hexdigest(), how + spared)
        elif number in _CHECK_COUNTS:
            yield Fingerprint(digest.hexdigest(), f"only {number} of {size} items, as they are slow to read{spared}")
            if (time.perf_counter() - begin_s) * _GROWTH > MAX_READING_S:
                return


def _sample(size: int) -> list[int]:
    """Return all positions of a small dataset; else the first, the last and a fixed choice between.

    The order is fixed, and starts with the first position.
    """
    if size <= MAX_ITEMS_FULLY_READ:
        chosen = list(range(size))
    else:
        words = np.random.Philox(key=size).random_raw(SAMPLED_ITEMS - 2)
        chosen = sorted({0, size - 1, *(int(word) % size for word in words)})
    words = np.random.Philox(key=size).random_raw(len(chosen))
    return chosen[:1] + [chosen[at] for at in np.argsort(words, kind="stable") if at]


class _OnDevice:
    """Placeholder for an item that only the process that uses the GPU can read."""


def _item(dataset: Any, position: int) -> object:
    """Return the item, or the name of the error that reading it raises; training reports that error in full."""
    random.seed(position)
    np.random.seed(position % 2**32)
    torch.default_generator.manual_seed(position)
    try:
        return dataset[position]
    except (Exception, SystemExit) as error:
        if is_of_cuda(error):
            return _OnDevice()
        return f"raises {type(error).__name__}"


def _add(digest: hashlib._Hash, value: object) -> None:
    """Add a value: type and size before the content, so that different structures give different bytes."""
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


def _add_tensor(digest: hashlib._Hash, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        _add_bytes(digest, "tensor", repr(tensor).encode())
        return
    raw = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    _add_bytes(digest, f"tensor {tensor.dtype} {tuple(tensor.shape)}", raw.numpy().tobytes())


def _add_bytes(digest: hashlib._Hash, kind: str, content: bytes) -> None:
    digest.update(f"{kind} {len(content)}:".encode())
    digest.update(content)
