"""Which activations are computed again in the backward pass instead of being kept: activation checkpointing as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Recompute:
    """For each of a model's repeated blocks, in order: None keeps all of its activations.

    Else a tuple of operator families (``"matmul"``, ``"attention"``, ...) whose outputs are kept while the rest is
    computed again; ``()`` computes the whole block again and keeps only its input.
    """

    blocks: tuple[tuple[str, ...] | None, ...]

    @classmethod
    def none(cls, count: int) -> Recompute:
        """Nothing is computed again."""
        return cls((None,) * count)

    @classmethod
    def every(cls, count: int, keep: Sequence[str] = ()) -> Recompute:
        """Every block, but for the outputs of the families in ``keep``."""
        return cls((tuple(keep),) * count)

    @property
    def count(self) -> int:
        """Blocks of which anything is computed again."""
        return sum(keep is not None for keep in self.blocks)
