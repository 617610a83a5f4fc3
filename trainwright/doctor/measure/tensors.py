"""Helpers for measurements: samples and padding of tensors, and the nodes that made them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.graph import Node

from trainwright.recorder.ranks import local_part

MIN_LENGTH = 4  # Minimum length of padded rows


def sampled(tensor: Tensor, most: int) -> Tensor:
    """Returns a copy of at most ``most`` evenly spaced elements; of a DTensor, of its local part."""
    flat = local_part(tensor.detach()).flatten()
    return flat[:: max(1, flat.numel() // most)][:most].clone()


def random_state(device: torch.device) -> Tensor:
    """Returns the state of the default generator of a GPU; for other devices, of the CPU generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.default_generator.get_state()


def padding_of(x: Tensor) -> tuple[int, Tensor] | None:
    """Returns the value that pads rows (B, T, ...) at one end, and the positions (B, T) that it fills; else None.

    At least two rows have two or more padded positions, and the padded lengths differ. Token ids are padded with the
    id that most rows end or begin with, vectors with zeros.
    """
    is_vector = x.is_floating_point()
    if x.dtype == torch.bool or x.is_complex() or x.dim() < 2 or is_vector != (x.dim() > 2) or x.shape[1] < MIN_LENGTH:
        return None
    for is_at_end in (True, False):
        rows = x.flip(1) if is_at_end else x
        filler = 0 if is_vector else int(rows[:, 0].mode().values)
        is_filler = ((rows == 0).flatten(2).all(2) if is_vector else rows == filler).long().cumprod(1).bool()
        lengths = is_filler.sum(1)
        if int((lengths >= 2).sum()) >= 2 and int(lengths.min()) < int(lengths.max()):
            return filler, is_filler.flip(1) if is_at_end else is_filler
    return None


def graph_of_nodes(numbers: Tensor, given: Sequence[Tensor], least: int) -> Tensor | None:
    """Returns ``numbers`` if it numbers the graph of each node: 0, 0, 1, ... for ``least`` graphs or more; else None.

    Another tensor of ``given`` must have as many rows.
    """
    if numbers.dtype != torch.int64 or numbers.dim() != 1 or len(numbers) < least or int(numbers[0]):
        return None
    jumps, graphs = numbers.diff(), int(numbers[-1]) + 1
    is_numbered = least <= graphs < len(numbers) and bool(((jumps == 0) | (jumps == 1)).all())
    has_nodes = any(each is not numbers and each.dim() and len(each) == len(numbers) for each in given)
    return numbers if is_numbered and has_nodes else None


def is_reordered(old: Sequence[int], new: Sequence[int]) -> bool:
    """Returns True if the last axes have the same sizes in another order, so that a view mixes up their values.

    Also if heads are split off from the features of a sequence, or merged, and are on the wrong side of its steps.
    Sizes that differ by 1 are left out: relative attention shifts by viewing (T, T + 1) as (T + 1, T).
    """
    if _moves_heads(tuple(old), tuple(new)) or _moves_heads(tuple(new), tuple(old)):
        return True
    before, after = ([size for size in each if size != 1] for each in (old, new))
    for count in (2, 3):
        one, other = before[-count:], after[-count:]
        if len(one) == len(other) == count and one != other and sorted(one) == sorted(other):
            moved = sorted({size for size, now in zip(one, other) if size != now})
            return all(b - a > 1 for a, b in pairwise(moved))
    return False


def _moves_heads(merged: tuple[int, ...], split: tuple[int, ...]) -> bool:
    """Returns True for (B, T, H * d) and (B, H, T, d), or (B * H, T, d)."""
    if len(merged) < 3 or split[-2:-1] != merged[-2:-1] or split[-1] < 2 or merged[-1] % split[-1]:
        return False
    heads, steps = merged[-1] // split[-1], merged[-2]
    before = split[:-2] in ((*merged[:-2], heads), (*merged[:-3], merged[-3] * heads))
    return before and heads > 1 and steps > 1 and heads != steps


VIEW_NODES = (
    "View", "Squeeze", "Unsqueeze", "Reshape", "Permute", "Slice", "Select", "Transpose", "TBackward", "ToCopy",
    "Clone", "Alias", "UnsafeView", "Index", "Expand",
)  # fmt: skip


def made_by(value: Tensor | Node | None, *names: str) -> Node | None:
    """Returns the node that computed a value, without views and copies, if its name begins with one of ``names``."""
    node = value.grad_fn if isinstance(value, Tensor) else value
    for _ in range(8):
        if node is None or type(node).__name__.startswith(names):
            return node
        if not type(node).__name__.startswith(VIEW_NODES) or not node.next_functions:
            return None
        node = node.next_functions[0][0]
    return None
