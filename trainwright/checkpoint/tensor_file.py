"""Tensors of a checkpoint in the safetensors format (https://github.com/huggingface/safetensors, "Format").

The library's writer aborts the process if memory runs out; this one raises MemoryError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from trainwright.checkpoint.manifest import FROZEN, invalid_content, read_manifest
from trainwright.checkpoint.stored import StoredTensor, TensorPart, do_overlap
from trainwright.runs.files import STATE, read_json

SHARDS = "shards.json"
"""Lists the parts of each tensor, in a checkpoint that several ranks wrote."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
_ALIGNMENT = 8  # the header is a multiple of this, in bytes; the widest elements come first, so all are aligned


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write contiguous tensors on the host, without copies. Raises TypeError for an unsupported dtype."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name}: a tensor of {tensor.dtype} cannot be kept in a file")
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(tensors[name].detach().reshape(-1).view(torch.uint8).numpy().data)


def open_tensors(checkpoint: Path, part: str) -> Mapping[str, Tensor | StoredTensor]:
    """Return the tensors of "model" or "rest" by name: memory-mapped, or read when needed.

    Only files that the manifest lists are opened, because ``verify`` checks no others.

    Raises CheckpointError for a file in another format, and other errors for an invalid shards.json.
    """
    listed = read_manifest(checkpoint)["files"]
    if SHARDS in listed:
        return _stored(checkpoint, part, listed)
    files = [checkpoint / f"{part}.safetensors"]
    if part == "model" and FROZEN in listed:
        files.append(checkpoint / FROZEN)
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            found |= load_file(file)
        except (SafetensorError, ValueError) as error:
            raise invalid_content(checkpoint, f"{file.name} is no safetensors file: {error}") from None
    return found


def _stored(checkpoint: Path, part: str, listed: Collection[str]) -> dict[str, Tensor | StoredTensor]:
    @cache
    def opened(file: Path) -> Any:
        try:
            return safe_open(file, framework="pt")
        except SafetensorError as error:
            raise invalid_content(checkpoint, f"{file.name} is no safetensors file: {error}") from None

    found: dict[str, Tensor | StoredTensor] = {}
    for name, entry in read_json(checkpoint / SHARDS, STATE, follow_links=True)[part].items():
        parts = tuple(_part(checkpoint, each, listed) for each in entry["parts"])
        dtype = getattr(torch, entry["dtype"])
        shape = torch.Size(entry["shape"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{SHARDS}: torch.{entry['dtype']} is no dtype")
        for each in parts:
            if len(each.box) != len(shape) or any(
                begin < 0 or length < 0 or begin + length > size
                for (begin, length), size in zip(each.box, shape, strict=True)
            ):
                raise ValueError(f"{SHARDS}: a part of {name} is not inside of its shape {tuple(shape)}")
        if sum(math.prod(length for _, length in each.box) for each in parts) != shape.numel():
            raise ValueError(f"{SHARDS}: the parts of {name} are not all of its shape {tuple(shape)}")
        if do_overlap(parts):
            raise ValueError(f"{SHARDS}: parts of {name} overlap")
        found[name] = StoredTensor(name, dtype, shape, parts, opened)
    return found


def _part(checkpoint: Path, entry: Mapping[str, Any], listed: Collection[str]) -> TensorPart:
    if entry["file"] not in listed:
        raise ValueError(f"{SHARDS}: {entry['file']!r} is not in the manifest")
    return TensorPart(checkpoint / entry["file"], tuple(zip(entry["offset"], entry["shape"], strict=True)))
