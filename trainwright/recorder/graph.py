"""The leaves of an autograd graph: the tensors that a backward pass accumulates gradients into."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import Node

MAX_NODES = 100_000


def leaves_of(tensor: Tensor) -> list[Tensor] | None:
    """Returns the leaves behind ``tensor``; None for a graph of more than MAX_NODES nodes.

    Leaves behind a reentrant checkpoint are not found.
    """
    if tensor.grad_fn is None:
        return [tensor] if tensor.requires_grad else []
    found: list[Tensor] = []
    seen: set[Node] = {tensor.grad_fn}
    waiting: list[Node] = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            found.append(leaf)
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                waiting.append(behind)
        if len(seen) > MAX_NODES:
            return None
    return found
