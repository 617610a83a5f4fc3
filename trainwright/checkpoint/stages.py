"""The state of a model whose stages lie on several ranks, brought together on the first one, as one process has it."""

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
    """What one stage has: tensors on the host, all that is no tensor, and the names of trained weights."""

    tensors: dict[TensorName, Tensor]
    values: StateDict
    trained: frozenset[str]


def bring_together(part: StagePart, stages: World) -> StagePart:
    """Returns on the first rank of ``stages`` what all of them have, one tensor after the other; on others their own.

    What several have, such as counters, is that of the first.
    """
    outlines = stages.collect((_outline(part.tensors), part.values, part.trained))
    tensors, values, trained = dict(part.tensors), part.values, part.trained
    taken = set(outlines[0][0])
    for source, (outline, other_values, other_trained) in enumerate(outlines[1:], start=1):
        for name, (shape, dtype) in outline.items():
            if name in taken:
                continue
            taken.add(name)
            if stages.rank == 0:
                tensors[name] = torch.empty(shape, dtype=dtype, device="cpu")
            if stages.rank in (0, source):
                stages.bring(tensors[name], source)
        values, trained = _merged(values, other_values), trained | other_trained
    return StagePart(tensors, values, trained)


def _outline(tensors: Mapping[TensorName, Tensor]) -> dict[TensorName, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _merged(first: Tree, second: Tree) -> Tree:
    """Mappings with the keys of both, the parameter groups of both; of anything else the first."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        shared = {key: _merged(first[key], second[key]) for key in first.keys() & second.keys()}
        return {**first, **second, **shared}
    if isinstance(first, list) and any(isinstance(each, Mapping) and "params" in each for each in first):
        return [*first, *second]
    return first
