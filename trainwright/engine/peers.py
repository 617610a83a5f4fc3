"""Replays the passes of other ranks, to find a rank that computes wrong gradients.

A wrong gradient of one rank is part of the sum that all ranks get, so no checksum of their weights differs. Here each
rank also computes the gradients of other ranks' batches, with the same weights, buffers and random numbers. The doctor
compares the checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from trainwright.checkpoint.checksums import Checksums, start_checksums
from trainwright.checkpoint.cursor import Cursor, StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import Ranks
from trainwright.engine.guard import BufferGuard
from trainwright.engine.loss import Loss, accumulate, as_loss_fn
from trainwright.engine.precision import Precision
from trainwright.engine.rank_sums import seed_step, share_buffers
from trainwright.engine.step import clear_grads
from trainwright.engine.user_log import collecting

INTERVAL_STEPS = 256  # Two replays in this many steps take less than 1 % of the time
NUM_REPLAYS = 2  # Replays of each batch, by the next ranks. With two ranks, the second replay is on the rank itself.


class Peers:
    """Replays on one of several ``ranks`` with the same model. ``processor`` is the name of this rank's GPU or CPU."""

    def __init__(
        self, ranks: Ranks, loss: Callable[..., Loss | Tensor], precision: Precision, *, seed: int, processor: str
    ) -> None:
        self.processor = processor
        self._ranks, self._precision, self._seed = ranks, precision, seed
        self._loss, self._loss_fn = loss if isinstance(loss, nn.Module) else None, as_loss_fn(loss)
        self._parameters: Sequence[Tensor | None] = ()
        self._replays: list[Checksums] = []
        self._own: dict[int, Checksums] = {}
        self._hooks: list[Any] = []
        self._num_attempts = 0
        self._is_off = False

    def step_begins(self, state: TrainState, batch: StepBatch, parameters: Sequence[Tensor]) -> None:
        """Replay the batches of the ranks before this one, if the step is due, and record the gradients of the step.

        ``parameters`` gives the order of the checksums. The checksum of a parameter that is not trained is 0.
        The replays come first, because no gradients are in memory then. The step seeds the generators afterwards.
        """
        self._reset()
        if (state.step + 1) % INTERVAL_STEPS or state.micro_limit is not None or self._is_off:
            return
        trained = {*map(id, state.parameters)}
        self._parameters = [p if id(p) in trained else None for p in parameters]
        share_buffers(state, self._ranks)
        buffers = BufferGuard()
        buffers.keep(state.model, state.loss or self._loss)
        moved, is_restored = batch, True
        for distance in range(1, NUM_REPLAYS + 1):
            moved = self._ranks.from_previous(_on(torch.device("cpu"), moved))
            seed_step(self._seed, state.step, (self._ranks.rank - distance) % self._ranks.size)
            self._replay(state, _on(state.device, moved))
            is_restored &= not buffers.put_back()
        self._is_off = not self._ranks.least(is_restored)  # off if the model writes to a buffer too large to be copied
        hooked = [p for p in self._parameters if p is not None and p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(self._record) for p in hooked]  # type: ignore[no-untyped-call]

    def _replay(self, state: TrainState, batch: StepBatch) -> None:
        clear_grads(state.optimizer)
        try:
            with collecting(None):  # drops the figures of ``tw.log``, which the step logs itself
                accumulate(state, batch, self._loss_fn, self._precision)
        except Exception:  # out of memory: the samples of another rank may be larger
            return
        self._replays.append(start_checksums([None if p is None else p.grad for p in self._parameters]))

    def _record(self, parameter: Tensor) -> None:
        """Start the checksum of a gradient. Runs before the hook that sums it over the ranks, which is added later."""
        self._own[id(parameter)] = start_checksums([parameter.grad])

    def gradients_are_cleared(self) -> None:
        """Count the attempts of a step. A second attempt, after an out-of-memory error, may split the batch."""
        self._num_attempts += 1
        self._own.clear()

    def step_ends(self) -> list[Checksums]:
        """Return the checksums of this rank's gradients, then the checksums of each replay.

        Returns [] if the step was not due, a replay failed, or the passes of the step began more than once.
        """
        own, replays, ids = self._own, self._replays, [*map(id, self._parameters)]
        is_complete = len(replays) == NUM_REPLAYS and self._num_attempts == 1
        self._reset()
        return [lambda: [own[each]()[0] if each in own else 0 for each in ids], *replays] if is_complete else []

    def _reset(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._replays, self._own, self._hooks, self._num_attempts = [], {}, [], 0


def _on(device: torch.device, batch: StepBatch) -> StepBatch:
    """Return the micro-batches on another device, without the position in the data."""
    micro = tuple(
        each._replace(data=tree_map_only(Tensor, lambda tensor: tensor.to(device), each.data)) for each in batch.micro
    )
    return replace(batch, micro=micro, cursor=Cursor(), bad=())
