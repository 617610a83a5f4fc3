"""Helpers for measurements: sample the elements of a tensor, and traverse its autograd graph."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import Node

from trainwright.recorder.ranks import own_part

MAX_NODES = 20_000  # Maximum number of visited graph nodes


def sampled(tensor: Tensor, most: int) -> Tensor:
    """Returns a copy of at most ``most`` evenly spaced elements of a tensor.

    Of a DTensor only the local part is sampled, because slicing it would communicate.
    """
    flat = own_part(tensor.detach()).flatten()
    return flat[:: max(1, flat.numel() // most)][:most].clone()


def nodes_behind(roots: Iterable[Node], stops: tuple[str, ...] = ()) -> set[Node]:
    """Returns ``roots`` and the nodes of the autograd graph that they depend on, at most about MAX_NODES.

    The search does not continue behind nodes whose class name begins with one of ``stops``.
    """
    pending = list(roots)
    seen = set(pending)
    while pending and len(seen) < MAX_NODES:
        node = pending.pop()
        if not stops or not type(node).__name__.startswith(stops):
            new = [each for each, _ in node.next_functions if each is not None and each not in seen]
            seen.update(new)
            pending.extend(new)
    return seen


def leaves_among(nodes: Iterable[Node]) -> set[Tensor]:
    """Returns the leaf tensors of those nodes that accumulate gradients."""
    return {leaf for each in nodes if (leaf := getattr(each, "variable", None)) is not None}
