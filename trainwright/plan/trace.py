"""What one training step would hold and do, as found without the device: the records that planning works on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["weights", "buffers", "gradients", "optimizer", "activations", "temporaries", "inputs"]
KINDS: tuple[Kind, ...] = ("weights", "buffers", "gradients", "optimizer", "activations", "temporaries", "inputs")
"""What memory is held for. Activations are what the backward pass needs; temporaries live within a pass."""
Phase = Literal["forward", "recompute", "backward", "update"]


@dataclass(frozen=True)
class Moment:
    """What is held after one operator: bytes by kind. ``module`` is the path of the innermost module, "" outside."""

    phase: Phase
    micro: int
    module: str
    op: str
    held: Mapping[Kind, int]

    @property
    def total(self) -> int:
        return sum(self.held.values())


@dataclass(frozen=True)
class Work:
    """All calls of one operator in one module, phase and dtype: what they compute and move.

    ``bytes`` are those of inputs read and outputs written, each once per call; views cost nothing.
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
    """Memory of an operator that fake tensors do not show. ``bound_bytes`` is the most it takes, None: not known."""

    op: str
    module: str
    why: str
    bound_bytes: int | None


@dataclass(frozen=True)
class Trace:
    """One optimizer step in the steady state, with the optimizer's state resident. Bytes are allocated ones.

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
        """The moment that holds most; the first of them."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def resident(self) -> Mapping[Kind, int]:
        """What is held between two steps."""
        return self.moments[-1].held

    @property
    def flops(self) -> int:
        return sum(work.flops for work in self.work)
