"""Tensors of a checkpoint whose parts several ranks wrote. A rank reads only the bytes of its own part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

Box: TypeAlias = Sequence[tuple[int, int]]
"""Begin and length of a part of a tensor in each dimension."""


@dataclass(frozen=True)
class TensorPart:
    """A part of a tensor: all of the entry of that name in a file."""

    file: Path
    box: Box


@dataclass(frozen=True)
class StoredTensor:
    """A tensor whose parts are in several files. Nothing is read before ``read`` or ``whole`` is called."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    parts: tuple[TensorPart, ...]
    open: Callable[[Path], Any]

    def read(self, box: Box) -> Tensor:
        """Return a part of the tensor. Reads no other bytes."""
        out = torch.empty([length for _, length in box], dtype=self.dtype, device="cpu")
        for part in self.parts:
            shared = [
                (max(begin, start), min(begin + length, start + size))
                for (begin, length), (start, size) in zip(box, part.box, strict=True)
            ]
            if any(begin >= end for begin, end in shared):
                continue
            into = tuple(slice(b - begin, e - begin) for (b, e), (begin, _) in zip(shared, box, strict=True))
            from_ = tuple(slice(b - start, e - start) for (b, e), (start, _) in zip(shared, part.box, strict=True))
            file = self.open(part.file)
            read = file.get_slice(self.name)[from_] if from_ else file.get_tensor(self.name)
            if read.dtype != self.dtype:
                raise ValueError(f"{self.name} is {read.dtype} in {part.file.name}, and {self.dtype} in shards.json")
            out[into] = read
        return out

    def whole(self) -> Tensor:
        """Return the full tensor."""
        return self.read([(0, size) for size in self.shape])


def read_whole(tree: Any) -> Any:
    """Return a decoded tree in which every stored tensor has been read in full."""
    if isinstance(tree, StoredTensor):
        return tree.whole()
    if isinstance(tree, Mapping):
        return {key: read_whole(each) for key, each in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(read_whole(each) for each in tree)
    return tree
