"""Encodes nested state as tensors (for safetensors) and JSON, neither of which can execute code when read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from trainwright.checkpoint.shards import is_divided
from trainwright.checkpoint.stored import StoredTensor, read_whole

Tree: TypeAlias = Any
"""Nested dicts, lists and tuples of tensors, numbers, strings, dtypes and None: the types a checkpoint can hold."""
StateDict: TypeAlias = dict[str, Tree]
"""Result of ``state_dict()``."""

_JSON_TYPES = frozenset({int, bool, str, type(None)})
_RESERVED_KEYS = ("__tensor__", "__tuple__", "__items__", "__float__", "__dtype__", "__sparse__")


def encode(tree: Tree) -> tuple[dict[str, Tensor], Tree]:
    """Split a tree of dicts, lists, tuples, strings, numbers, dtypes, None and tensors into tensors and JSON.

    Returns the tensors by a path-like name, and a JSON value that refers to them. A tensor that occurs twice (tied
    weights) is stored once. Memory layouts other than row-major are restored by ``decode``.

    Raises:
        TypeError: The tree contains another type; the message has its path.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[tuple[Tree, ...], str] = {}

    def below(path: str, key: object) -> str:
        return f"{path}.{key}" if path else str(key)

    def each(items: Sequence[Tree], path: str) -> list[Tree]:
        if _JSON_TYPES.issuperset(map(type, items)):  # fast path: the state of a generator is a thousand numbers
            return [*items]
        return [walk(item, below(path, i)) for i, item in enumerate(items)]

    def walk(value: Tree, path: str) -> Tree:
        match value:
            case Tensor() if value.layout == torch.sparse_coo:
                parts = {"indices": value._indices(), "values": value._values(), "size": list(value.shape)}
                return {"__sparse__": walk(parts, path)}
            case Tensor() if value.layout == torch.strided:
                identity = _identity(value)
                if identity not in names:
                    while path in tensors:  # {"a.b": x, "a": {"b": y}} and keys 1 and "1" have the same path
                        path += "'"
                    names[identity] = path
                    tensors[path] = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
                return {"__tensor__": names[identity], **_beside(value)}
            case Mapping():
                if all(isinstance(key, str) and key not in _RESERVED_KEYS for key in value):
                    return {key: walk(item, below(path, key)) for key, item in value.items()}
                return {"__items__": [[walk(key, path), walk(item, below(path, key))] for key, item in value.items()]}
            case tuple():
                return {"__tuple__": each(value, path)}
            case list():
                return each(value, path)
            case torch.dtype():
                return {"__dtype__": str(value).removeprefix("torch.")}
            case float() if not math.isfinite(value):
                return {"__float__": repr(value)}
            case None | bool() | int() | float() | str():
                return value
        raise TypeError(f"{path}: a {type(value).__name__} cannot be kept in a checkpoint")

    return tensors, walk(tree, "")


def decode(tensors: Mapping[str, Tensor | StoredTensor], value: Tree) -> Tree:
    """Invert ``encode``. A StoredTensor is returned unread, without its memory layout, unless complex or sparse."""
    if isinstance(value, list):
        return [decode(tensors, item) for item in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        return _restored(tensors[value["__tensor__"]], value)
    if "__tuple__" in value:
        return tuple(decode(tensors, item) for item in value["__tuple__"])
    if "__items__" in value:
        return {decode(tensors, key): decode(tensors, item) for key, item in value["__items__"]}
    if "__float__" in value:
        return float(value["__float__"])
    if "__sparse__" in value:
        parts = decode(tensors, value["__sparse__"])
        parts = read_whole(parts)
        return torch.sparse_coo_tensor(parts["indices"], parts["values"], parts["size"], check_invariants=True)
    if "__dtype__" in value:
        return _dtype(value["__dtype__"])
    return {key: decode(tensors, item) for key, item in value.items()}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch.{name} is no dtype")
    return found


def _beside(tensor: Tensor) -> StateDict:
    """Return properties that a file of contiguous real numbers loses; fused kernels depend on the memory layout."""
    details: StateDict = {"complex": True} if tensor.is_complex() else {}
    if tensor.layout == torch.strided and not tensor.is_contiguous() and _is_dense(tensor.shape, tensor.stride()):
        details["stride"] = list(tensor.stride())
    return details


def _restored(tensor: Tensor | StoredTensor, reference: Mapping[str, Tree]) -> Tensor | StoredTensor:
    if isinstance(tensor, StoredTensor):
        return torch.view_as_complex(tensor.whole()) if reference.get("complex") else tensor
    if reference.get("complex"):
        tensor = torch.view_as_complex(tensor)
    if "stride" not in reference:
        return tensor
    if not _is_dense(tensor.shape, reference["stride"]):
        raise ValueError(f"strides {reference['stride']} of a tensor of {tuple(tensor.shape)} leave gaps")
    return torch.empty_strided(tensor.shape, reference["stride"], dtype=tensor.dtype).copy_(tensor)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if the elements of a tensor fill its memory without gaps or overlaps, in any order."""
    filled = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride != filled:
            return False
        filled *= size
    return True


def _identity(tensor: Tensor) -> tuple[Tree, ...]:
    """Return a key that is equal for tensors that are the same view of the same memory.

    An empty tensor equals only itself.
    """
    if tensor.numel() == 0 or tensor.device.type == "meta" or is_divided(tensor):
        return (id(tensor),)  # a rank's part may be empty, and all ranks must find the same tensors
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by the size of an element in bytes."""


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors hold the same bits, including NaN and the sign of zero.

    Tensors on one device are compared there.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    kind = INTEGERS.get(a.element_size())
    is_plain = all(t.layout == torch.strided and not (t.is_conj() or t.is_neg() or t.is_quantized) for t in (a, b))
    if kind is not None and is_plain and a.device == b.device:
        return torch.equal(a.detach().view(kind), b.detach().view(kind))
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().flatten().contiguous().view(torch.uint8)
