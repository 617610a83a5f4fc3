"""What several instruments do with tensors: sample their elements, and walk the autograd graph behind them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import Node

from trainwright.recorder.ranks import own_part

MAX_NODES = 20_000  # Maximum number of visited graph nodes


def sampled(tensor: Tensor, most: int) -> Tensor:
    """Returns a copy of elements that are spread over a tensor.

    A DTensor is not sliced as a whole, because that would communicate.
    """
    flat = own_part(tensor.detach()).flatten()
    return flat[:: max(1, flat.numel() // most)][:most].clone()


def nodes_behind(roots: Iterable[Node], stops: tuple[str, ...] = ()) -> set[Node]:
    """Returns the nodes of the graph behind these, and themselves.

    Nodes whose class begins with one of ``stops`` are not passed.
    """
    waiting = list(roots)
    seen = set(waiting)
    while waiting and len(seen) < MAX_NODES:
        node = waiting.pop()
        if not stops or not type(node).__name__.startswith(stops):
            new = [each for each, _ in node.next_functions if each is not None and each not in seen]
            seen.update(new)
            waiting.extend(new)
    return seen


def leaves_among(nodes: Iterable[Node]) -> set[Tensor]:
    """Returns the leaves of the graph among these nodes."""
    return {leaf for each in nodes if (leaf := getattr(each, "variable", None)) is not None}
