"""Writes tensors in the safetensors format (https://github.com/huggingface/safetensors, "Format").

The library's writer aborts the process if memory runs out; this one raises MemoryError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

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
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(tensors[name].detach().reshape(-1).view(torch.uint8).numpy().data)
