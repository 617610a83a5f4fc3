"""The protocol by which a step reports to the recorder. Internal: users have ``Probe`` and ``Observer``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.rng import TorchGenerators
from trainwright.checkpoint.train_state import TrainState
from trainwright.optim.clip import ClipFn

Passes: TypeAlias = Callable[[TrainState, StepBatch], object]
"""Forward and backward passes over a batch."""


class StepWitness(Protocol):
    """Called during a step, for facts that an observer cannot get afterwards, such as the generators at its start.

    Each method is called right before the operation that it names, on the thread that trains. Implementations only
    read, and never raise: an exception would end the step.
    """

    @property
    def is_listening(self) -> bool:
        """True if the operators of this step are reported, so that its Python code must run. Read after
        ``step_begins``.
        """

    def memory_ran_out(self) -> bool:
        """An attempt at the step ran out of memory. Frees what can be freed; returns False if nothing was held."""

    def step_begins(self, state: TrainState, batch: StepBatch, generators: TorchGenerators) -> None:
        """The step begins. ``batch`` is unsplit, as it came from the data."""

    def can_repeat(self, passes: Passes) -> None:
        """Called once, before the first step, if ``passes`` computes the gradients of a batch again.

        It calls model, loss and backward as a step does, on the current weights and with the current generators.
        """

    def gradients_are_cleared(self, optimizer: Optimizer) -> None:
        """The passes over the micro-batches begin. A second call in one step: the first attempt ran out of memory."""

    def loss_is_scaled(self, loss: Tensor, scaled: Tensor) -> None:
        """``backward`` will be called on ``scaled``; ``loss`` is the same without the loss scale."""

    def gradients_are_multiplied(self, factor: Tensor | float) -> None:
        """All gradients of the optimizer are multiplied: by 1 / loss scale, or by the weight correction."""

    def gradients_are_clipped(self, clip: ClipFn, parameters: Sequence[Tensor], total_norm: Tensor) -> None:
        """``clip`` is about to change the gradients of ``parameters``, whose 0-d norm is ``total_norm``."""


class _Silent:
    """The null object: this step is not recorded."""

    is_listening = False

    def memory_ran_out(self) -> bool:
        return False

    def step_begins(self, state: TrainState, batch: StepBatch, generators: TorchGenerators) -> None: ...
    def can_repeat(self, passes: Passes) -> None: ...
    def gradients_are_cleared(self, optimizer: Optimizer) -> None: ...
    def loss_is_scaled(self, loss: Tensor, scaled: Tensor) -> None: ...
    def gradients_are_multiplied(self, factor: Tensor | float) -> None: ...
    def gradients_are_clipped(self, clip: ClipFn, parameters: Sequence[Tensor], total_norm: Tensor) -> None: ...


SILENT: StepWitness = _Silent()
