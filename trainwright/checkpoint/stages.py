"""Gathers the state of a model whose stages are on several ranks on the first rank, as one process has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from trainwright.checkpoint.codec import StateDict, Tree
from trainwright.distributed.group import World

TensorName = tuple[str, str]
"""The file and the name of a tensor of a checkpoint."""


class StagePart(NamedTuple):
    """The state of one stage: tensors on the host, values that are not tensors, and the names of trained weights."""

    tensors: dict[TensorName, Tensor]
    values: StateDict
    trained: frozenset[str]


def gather_stages(part: StagePart, stages: World) -> StagePart:
    """Return the state of all ``stages`` on the first rank, sent one tensor at a time; on other ranks their part.

    Values that several stages have, such as counters, are those of the first.
    """
    outlines = stages.collect((_outline(part.tensors), part.values, part.trained))
    tensors = dict(part.tensors)
    values = part.values
    trained = part.trained
    taken = set(outlines[0][0])
    for source, (outline, other_values, other_trained) in enumerate(outlines[1:], start=1):
        for name, (shape, dtype) in outline.items():
            if name in taken:
                continue
            taken.add(name)
            if stages.rank == 0:
                tensors[name] = torch.empty(shape, dtype=dtype, device="cpu")
            if stages.rank in (0, source):
                stages.send_to_first(tensors[name], source)
        values, trained = _merged(values, other_values), trained | other_trained
    return StagePart(tensors, values, trained)


def _outline(tensors: Mapping[TensorName, Tensor]) -> dict[TensorName, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _merged(first: Tree, second: Tree) -> Tree:
    """Merge mappings by key and concatenate parameter groups; otherwise return the first."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        shared = {key: _merged(first[key], second[key]) for key in first.keys() & second.keys()}
        return {**first, **second, **shared}
    if isinstance(first, list) and any(isinstance(each, Mapping) and "params" in each for each in first):
        return [*first, *second]
    return first
