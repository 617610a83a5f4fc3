"""What one traced step held and computed: the records that ``forecast`` makes and plans are computed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["weights", "buffers", "gradients", "optimizer", "activations", "temporaries", "inputs"]
KINDS: tuple[Kind, ...] = ("weights", "buffers", "gradients", "optimizer", "activations", "temporaries", "inputs")
"""What memory is held for. Activations are what the backward pass needs; temporaries live within a pass."""
Phase = Literal["forward", "checkpointing", "backward", "update"]
"""``checkpointing``: a forward pass that activation checkpointing repeats during backward."""


@dataclass(frozen=True)
class Moment:
    """The bytes of each kind that are held after one operator. ``module`` is the path of the innermost module."""

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

    ``bytes`` are those of inputs read and outputs written, each once per call; views count nothing.
    """

    phase: Phase
    module: str
    op: str
    dtype: str
    calls: int
    flops: int
    bytes: int


@dataclass(frozen=True)
class Unseen:
    """Memory of an operator that fake tensors do not show. ``bound_bytes`` is its upper bound, None: not known."""

    op: str
    module: str
    why: str
    bound_bytes: int | None


@dataclass(frozen=True)
class Trace:
    """One optimizer step in the steady state, with the optimizer's state resident. Bytes are those allocated.

    ``moments`` has one entry for each operator that allocates or frees, in order. ``kept`` is what the first
    micro-batch's forward pass leaves for backward, by the path of the module that made it.
    """

    device: str
    moments: tuple[Moment, ...]
    kept: Mapping[str, int]
    work: tuple[Work, ...]
    unseen: tuple[Unseen, ...] = ()

    @property
    def peak(self) -> Moment:
        """The first of the moments that hold most."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def resident(self) -> Mapping[Kind, int]:
        """The bytes of each kind that are held between two steps."""
        return self.moments[-1].held

    @property
    def held(self) -> Mapping[Kind, int]:
        """The bytes of each kind that a step holds, if it held all at once; temporaries are left out."""
        return {**self.resident, "activations": sum(self.kept.values())}

    @property
    def flops(self) -> int:
        """FLOPs of the whole step."""
        return sum(work.flops for work in self.work)
