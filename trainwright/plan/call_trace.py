"""Records of one traced step: the memory held after each operator, and the work of each operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["weights", "buffers", "gradients", "optimizer", "activations", "temporaries", "inputs"]
KINDS: tuple[Kind, ...] = ("weights", "buffers", "gradients", "optimizer", "activations", "temporaries", "inputs")
"""The purposes of memory. Activations are kept for the backward pass; temporaries live within one pass."""
Phase = Literal["forward", "checkpointing", "backward", "update"]
"""``checkpointing`` is a forward pass that activation checkpointing repeats during backward."""


@dataclass(frozen=True)
class Moment:
    """Bytes of each kind held after one operator. ``module`` is the path of the innermost module."""

    phase: Phase
    micro: int
    module: str
    op: str
    held: Mapping[Kind, int]

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.held.values())


@dataclass(frozen=True)
class Work:
    """The sum over all calls of one operator in one module, phase and dtype.

    ``bytes`` counts inputs read and outputs written, once per call. Views count as 0.
    """

    phase: Phase
    module: str
    op: str
    dtype: str
    calls: int
    flops: int
    bytes: int


@dataclass(frozen=True)
class HiddenBytes:
    """Memory of an operator that fake tensors do not show. ``bound_bytes`` is an upper bound, None if unknown."""

    op: str
    module: str
    why: str
    bound_bytes: int | None


@dataclass(frozen=True)
class Trace:
    """One optimizer step in the steady state, with the optimizer's state resident. Bytes are allocated bytes.

    ``moments`` has one entry for each operator that allocates or frees, in order. ``kept`` is the bytes that the first
    micro-batch's forward pass keeps for backward, by the path of the module that made them.
    """

    device: str
    moments: tuple[Moment, ...]
    kept: Mapping[str, int]
    work: tuple[Work, ...]
    unseen: tuple[HiddenBytes, ...] = ()

    @property
    def peak(self) -> Moment:
        """The moment with the most bytes; the first of them if several are equal."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def resident(self) -> Mapping[Kind, int]:
        """The bytes of each kind that are held between two steps."""
        return self.moments[-1].held

    @property
    def held(self) -> Mapping[Kind, int]:
        """The bytes of each kind that a step would hold if it held everything at once, without temporaries."""
        return {**self.resident, "activations": sum(self.kept.values())}

    @property
    def flops(self) -> int:
        """FLOPs of the complete step."""
        return sum(work.flops for work in self.work)
