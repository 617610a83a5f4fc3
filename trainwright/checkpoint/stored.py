"""Tensors of a sharded checkpoint. Each rank reads only the bytes that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

Box: TypeAlias = Sequence[tuple[int, int]]
"""Offset and length of a part of a tensor in each dimension."""


@dataclass(frozen=True)
class TensorPart:
    """A part of a tensor. ``file`` has it under the name of the tensor; ``box`` is its place in the full tensor."""

    file: Path
    box: Box


@dataclass(frozen=True)
class StoredTensor:
    """A tensor whose parts are in several files. Only ``read`` and ``whole`` read from them."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    parts: tuple[TensorPart, ...]
    open: Callable[[Path], Any]

    def read(self, box: Box) -> Tensor:
        """Read a part of the tensor, and no other bytes. Raises ValueError if a file has another dtype."""
        out = torch.empty([length for _, length in box], dtype=self.dtype, device="cpu")
        for part in self.parts:
            overlap = [
                (max(begin, start), min(begin + length, start + size))
                for (begin, length), (start, size) in zip(box, part.box, strict=True)
            ]
            if any(begin >= end for begin, end in overlap):
                continue
            target = tuple(slice(b - begin, e - begin) for (b, e), (begin, _) in zip(overlap, box, strict=True))
            source = tuple(slice(b - start, e - start) for (b, e), (start, _) in zip(overlap, part.box, strict=True))
            file = self.open(part.file)
            read = file.get_slice(self.name)[source] if source else file.get_tensor(self.name)
            if read.dtype != self.dtype:
                raise ValueError(f"{self.name} is {read.dtype} in {part.file.name}, but {self.dtype} in shards.json")
            out[target] = read
        return out

    def whole(self) -> Tensor:
        """Read the full tensor."""
        return self.read([(0, size) for size in self.shape])


def read_whole(tree: Any) -> Any:
    """Return the tree with every StoredTensor replaced by the full tensor."""
    if isinstance(tree, StoredTensor):
        return tree.whole()
    if isinstance(tree, Mapping):
        return {key: read_whole(each) for key, each in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(read_whole(each) for each in tree)
    return tree
