"""Activation checkpointing as data: which activations of each block are kept and which are recomputed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Checkpointing:
    """The activations that each of a model's repeated blocks keeps, in order. None means all of its activations.

    A tuple names the operator families (``"matmul"``, ``"attention"``, ``"gelu"``, ...) whose outputs are kept;
    backward recomputes the rest. ``()`` keeps only the block's input. ``"matmul:3"`` is only the fourth call of that
    family in the block's forward pass.
    """

    blocks: tuple[tuple[str, ...] | None, ...]

    @classmethod
    def none(cls, count: int) -> Checkpointing:
        """No checkpointing: every block keeps all of its activations."""
        return cls((None,) * count)

    @classmethod
    def every(cls, count: int, keep: Sequence[str] = ()) -> Checkpointing:
        """Every block is checkpointed and keeps the outputs of the families in ``keep``."""
        return cls((tuple(keep),) * count)

    @property
    def count(self) -> int:
        """The number of checkpointed blocks."""
        return sum(keep is not None for keep in self.blocks)


def describe(checkpointing: Checkpointing) -> str:
    """Return one line that says what the backward pass recomputes in each group of equal blocks.

    Example: ``recomputed in the backward pass: 4 blocks whole; 6 blocks except matmul 0 1, gelu; 2 blocks not at all``.
    """
    counts = Counter(checkpointing.blocks)
    parts = [f"{count} {'block' if count == 1 else 'blocks'} {_extent(keep)}" for keep, count in counts.items()]
    return "recomputed in the backward pass: " + "; ".join(parts)


def _extent(keep: tuple[str, ...] | None) -> str:
    if not keep:
        return "not at all" if keep is None else "whole"
    calls: dict[str, list[str]] = {}
    for site in keep:
        family, _, index = site.partition(":")
        calls.setdefault(family, []).extend([index] if index else [])
    return "except " + ", ".join(" ".join([family, *indices]) for family, indices in calls.items())
