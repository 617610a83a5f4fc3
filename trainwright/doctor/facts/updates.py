"""Effect of an update on the weights and on the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class UpdateFacts:
    """One replayed update."""

    experiment: ClassVar[str] = "update"
    loss: float  # Loss of the batch before the update
    after: float  # Loss of the batch after the update
    optimizers: int  # Number of optimizers that step
    lr: tuple[float, ...]  # Learning rate of each group in each update
    weight_decay: tuple[float, ...]  # Weight decay of each group in each update
    decoupled: bool  # Weight decay acts on the weights, as in AdamW
    grad_norm: float  # Norm of the gradients
    norm_at_clip: float | None  # Norm of the gradients before clipping; None without a clip
    weight_norm: float  # Norm of the weights with a gradient
    ratio: float  # Norm of the update / ``weight_norm``
    input_rms: float | None  # Largest root mean square of an input; None without a floating-point input


@dataclass(frozen=True)
class BatchStepsFacts:
    """Repeated updates on one batch."""

    experiment: ClassVar[str] = "batch_steps"
    losses: tuple[float, ...]  # The loss after each update
    falls_at: float | None  # The first factor of the learning rate at which the loss falls steadily; None without one


@dataclass(frozen=True)
class AgainFacts:
    """A replay compared with the recorded step and with a second replay."""

    experiment: ClassVar[str] = "again"
    same_losses: bool  # The replayed losses equal the recorded ones
    tolerance: float  # Relative difference that is allowed for a compiled model
    same_twice: bool  # Both replays have equal losses
    norm_then: float | None  # Norm of the recorded gradients
    norm_now: float | None  # Norm of the replayed gradients
    error: str | None  # Error of the replay; None without one


@dataclass(frozen=True)
class LoadedMomentsFacts:
    """Second moments of an optimizer before its first watched update, compared with the squared gradients there."""

    experiment: ClassVar[str] = "moments"
    kind: str  # Class of the optimizer
    names: tuple[str, ...]  # Names of the tensors
    gaps: tuple[float, ...]  # For each tensor, ``abs(log10(moment / squared gradient))``, largest first
    matched: float  # Mean of the gaps if moments and gradients of tensors with equal shape are matched by size instead
