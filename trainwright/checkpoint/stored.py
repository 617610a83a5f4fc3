"""Tensors of a checkpoint whose parts several ranks wrote. A rank reads only the bytes of its own part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

Box: TypeAlias = Sequence[tuple[int, int]]
"""Begin and length of a part of a tensor in each dimension."""
MAX_IRREGULAR_PARTS = 2000
"""Of parts that form no grid each is compared with each other."""


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
            held = file.get_slice(self.name)
            if [*held.get_shape()] != [length for _, length in part.box]:  # torch would repeat a smaller one
                raise ValueError(
                    f"{self.name} has the shape {held.get_shape()} in {part.file.name}, not in shards.json"
                )
            read = held[from_] if from_ else file.get_tensor(self.name)
            if read.dtype != self.dtype:
                raise ValueError(f"{self.name} is {read.dtype} in {part.file.name}, and {self.dtype} in shards.json")
            out[into] = read
        return out

    def whole(self) -> Tensor:
        """Return the full tensor."""
        return self.read([(0, size) for size in self.shape])


def do_overlap(parts: Sequence[TensorPart]) -> bool:
    """Return True if parts of one tensor overlap."""
    boxes = {tuple(part.box) for part in parts if all(length for _, length in part.box)}
    axes = [sorted(set(axis)) for axis in zip(*boxes)]
    if all(begin + length <= after for axis in axes for (begin, length), (after, _) in pairwise(axis)):
        return len(boxes) < sum(all(length for _, length in part.box) for part in parts)  # a grid, as torch divides
    return len(boxes) > MAX_IRREGULAR_PARTS or any(
        all(max(b, c) < min(b + m, c + n) for (b, m), (c, n) in zip(one, other))
        for one, other in combinations(boxes, 2)
    )


def read_whole(tree: Any) -> Any:
    """Return a decoded tree in which every stored tensor has been read in full."""
    if isinstance(tree, StoredTensor):
        return tree.whole()
    if isinstance(tree, Mapping):
        return {key: read_whole(each) for key, each in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(read_whole(each) for each in tree)
    return tree
