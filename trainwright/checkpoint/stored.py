"""Tensors of a sharded checkpoint. Each rank reads only the bytes that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

Box: TypeAlias = Sequence[tuple[int, int]]
"""Offset and length of a part of a tensor in each dimension."""
MAX_IRREGULAR_PARTS = 2000
"""Maximum number of parts that form no grid, because each pair of them is compared."""


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
            stored = file.get_slice(self.name)
            if [*stored.get_shape()] != [length for _, length in part.box]:  # torch would broadcast a smaller one
                raise ValueError(
                    f"{self.name} has the shape {stored.get_shape()} in {part.file.name}, but another in shards.json"
                )
            read = stored[source] if source else file.get_tensor(self.name)
            if read.dtype != self.dtype:
                raise ValueError(f"{self.name} is {read.dtype} in {part.file.name}, but {self.dtype} in shards.json")
            out[target] = read
        return out

    def whole(self) -> Tensor:
        return self.read([(0, size) for size in self.shape])


def do_overlap(parts: Sequence[TensorPart]) -> bool:
    """Return True if parts of one tensor overlap."""
    boxes = {tuple(part.box) for part in parts if all(length for _, length in part.box)}
    axes = [sorted(set(axis)) for axis in zip(*boxes)]
    if all(begin + length <= after for axis in axes for (begin, length), (after, _) in pairwise(axis)):
        # the parts form a grid, as torch divides tensors, so they overlap only if two are equal
        return len(boxes) < sum(all(length for _, length in part.box) for part in parts)
    return len(boxes) > MAX_IRREGULAR_PARTS or any(
        all(max(b, c) < min(b + m, c + n) for (b, m), (c, n) in zip(one, other))
        for one, other in combinations(boxes, 2)
    )


def read_whole(tree: Any) -> Any:
    """Return the tree with every StoredTensor replaced by the full tensor."""
    if isinstance(tree, StoredTensor):
        return tree.whole()
    if isinstance(tree, Mapping):
        return {key: read_whole(each) for key, each in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(read_whole(each) for each in tree)
    return tree
