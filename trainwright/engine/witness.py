"""What a step tells the recorder while it runs. Internal: users have ``Probe`` and ``Observer``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from trainwright.engine.clip import ClipFn
from trainwright.state.cursor import StepBatch
from trainwright.state.train_state import TrainState


class StepWitness(Protocol):
    """Hears what an observer cannot know after the step: the state of the generators at its begin, and its order.

    Each method is called right before it happens, on the thread that trains. A witness reads only, and does not raise:
    an exception would end the step.
    """

    def step_begins(self, state: TrainState, batch: StepBatch) -> None:
        """Nothing of the step has been done. ``batch`` is as the data gave it, before any split."""

    def gradients_are_cleared(self, optimizer: Optimizer) -> None:
        """The passes over the micro-batches begin. A second call in one step: the try before ran out of memory."""

    def loss_is_scaled(self, loss: Tensor, scaled: Tensor) -> None:
        """``scaled`` is what ``backward`` is called on; ``loss`` is the same without the loss scale."""

    def gradients_are_multiplied(self, factor: Tensor | float) -> None:
        """All gradients of the optimizer are multiplied: by 1 / loss scale, or by the weight correction."""

    def gradients_are_clipped(self, clip: ClipFn, parameters: Sequence[Tensor], total_norm: Tensor) -> None:
        """``clip`` is about to change the gradients of ``parameters``, whose 0-d norm is ``total_norm``."""


class _Silent:
    """The null object: nobody records this step."""

    def step_begins(self, state: TrainState, batch: StepBatch) -> None: ...
    def gradients_are_cleared(self, optimizer: Optimizer) -> None: ...
    def loss_is_scaled(self, loss: Tensor, scaled: Tensor) -> None: ...
    def gradients_are_multiplied(self, factor: Tensor | float) -> None: ...
    def gradients_are_clipped(self, clip: ClipFn, parameters: Sequence[Tensor], total_norm: Tensor) -> None: ...


SILENT: StepWitness = _Silent()
