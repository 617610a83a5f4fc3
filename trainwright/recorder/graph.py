"""Walks through the autograd graph."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import Node

MAX_NODES = 20_000  # Maximum number of nodes that a measurement visits


def graph_behind(
    ends: Iterable[Tensor | Node | None], *, stops: tuple[str, ...] = (), most: float = MAX_NODES
) -> list[Node]:
    """Returns these nodes, or the nodes that made these tensors, and all nodes behind them, each once, nearest first.

    The search ends after about ``most`` nodes. It does not continue behind nodes whose class name begins with one of
    ``stops``. Nodes behind a reentrant checkpoint are not found.
    """
    first = [each.grad_fn if isinstance(each, Tensor) else each for each in ends]
    nodes = list(dict.fromkeys(each for each in first if each is not None))
    seen = set(nodes)
    for node in nodes:  # grows during the iteration
        if len(nodes) >= most:
            break
        if stops and type(node).__name__.startswith(stops):
            continue
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                nodes.append(behind)
    return nodes


def leaves_among(nodes: Iterable[Node]) -> set[Tensor]:
    """Returns the leaf tensors of the AccumulateGrad nodes among ``nodes``."""
    return {leaf for each in nodes if (leaf := getattr(each, "variable", None)) is not None}


def leaves_of(tensors: Iterable[Tensor]) -> set[Tensor]:
    """Returns the leaf tensors into which a backward pass from these tensors accumulates gradients."""
    tensors = list(tensors)
    leaves = {each for each in tensors if each.requires_grad and each.grad_fn is None}
    return leaves | leaves_among(graph_behind(tensors, most=math.inf))
