"""The ledger of skipped steps: no step is skipped silently, in any precision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainwright.checkpoint.codec import StateDict
from trainwright.checkpoint.cursor import Ids, StepBatch

MAX_PENDING_STEPS = 256
NOTHING_COUNTED = "nothing was counted: the weight of the whole batch is 0"
NOT_FINITE = "the gradient norm is not finite"


@dataclass(frozen=True)
class SkippedStep:
    """One step whose update was not applied.

    Attributes:
        step: Number of the step.
        reason: Shown to the user.
        loss: Loss of the step.
        grad_norm: Norm of its gradients.
        micro_batch: The first micro-batch with a non-finite loss; None if unknown.
        sample_ids: Samples of that micro-batch, or of the full step if it is unknown.
        scale: Loss scale of the step; None without loss scaling.
    """

    step: int
    reason: str
    loss: float
    grad_norm: float
    micro_batch: int | None
    sample_ids: tuple[int, ...]
    scale: float | None


class _Pending(NamedTuple):
    step: int
    skipped: Tensor
    grad_norm: Tensor
    losses: Sequence[Tensor]
    ids: Sequence[Ids]  # by micro-batch; keeping the batches would keep their device memory
    scale: Tensor | None
    reason: str


class SkipLedger:
    """Counts and names skipped steps without waiting for the device at every step.

    ``note`` only stores references. ``read_pending`` reads all flags in one transfer and makes an entry for each true
    flag. It runs automatically every 256 steps (one host sync each).
    """

    def __init__(self) -> None:
        self.entries: list[SkippedStep] = []
        self._pending: list[_Pending] = []

    def note(
        self,
        step: int,
        skipped: Tensor,
        *,
        grad_norm: Tensor,
        losses: Sequence[Tensor],
        batch: StepBatch,
        scale: Tensor | None,
        reason: str = "",
    ) -> None:
        """Record one step without waiting for the device. ``losses`` are the 0-d losses of its micro-batches.

        ``reason`` is why the update was skipped, if not because of its gradients or its weight.
        """
        ids = [micro.ids for micro in batch.micro]
        self._pending.append(_Pending(step, skipped, grad_norm, losses, ids, scale, reason))
        if len(self._pending) >= MAX_PENDING_STEPS:
            self.read_pending()

    def add(self, entries: Iterable[SkippedStep]) -> None:
        """Add steps whose update was undone afterwards."""
        self.read_pending()
        self.entries += entries

    def read_pending(self) -> None:
        """Read all pending steps in one host sync."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        on_cpu = pending[0].skipped.device.type == "cpu"
        flags = [bool(n.skipped) for n in pending] if on_cpu else torch.stack([n.skipped for n in pending]).tolist()
        self.entries += [_entry(note) for note, skipped in zip(pending, flags, strict=True) if skipped]

    @property
    def total(self) -> int:
        """Number of steps skipped so far; reads pending steps."""
        self.read_pending()
        return len(self.entries)

    def state_dict(self) -> StateDict:
        self.read_pending()
        return {"entries": [asdict(entry) for entry in self.entries]}

    def load_state_dict(self, saved: StateDict) -> None:
        self._pending = []
        self.entries = [
            SkippedStep(**{**entry, "sample_ids": tuple(entry["sample_ids"])}) for entry in saved["entries"]
        ]


def _entry(note: _Pending) -> SkippedStep:
    losses = torch.stack([loss.float().cpu() for loss in note.losses])
    bad = (~torch.isfinite(losses)).nonzero().flatten().tolist()
    micro_batch = bad[0] if bad else (0 if len(note.losses) == 1 else None)
    ids = note.ids if micro_batch is None else [note.ids[micro_batch]]
    norm = float(note.grad_norm)
    return SkippedStep(
        step=note.step,
        reason=note.reason or (NOTHING_COUNTED if math.isfinite(norm) else NOT_FINITE),
        loss=float(losses.sum()),
        grad_norm=norm,
        micro_batch=micro_batch,
        sample_ids=tuple(int(i) for part in ids for i in part),
        scale=None if note.scale is None else float(note.scale),
    )
