"""Effect of an update on the weights and on the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class UpdateFacts:
    """One replayed update.

    Attributes:
        loss: Loss of the batch before the update.
        after: Loss of the batch after the update.
        optimizers: Number of optimizers that step.
        lr: Learning rate of each group in each update.
        weight_decay: Weight decay of each group in each update.
        decoupled: Weight decay acts on the weights, as in AdamW.
        grad_norm: Norm of the gradients.
        norm_at_clip: Norm of the gradients before clipping; None without a clip.
        weight_norm: Norm of the weights with a gradient.
        ratio: Norm of the update / ``weight_norm``.
        input_rms: Largest root mean square of an input; None without a floating-point input.
    """

    experiment: ClassVar[str] = "update"
    loss: float
    after: float
    optimizers: int
    lr: tuple[float, ...]
    weight_decay: tuple[float, ...]
    decoupled: bool
    grad_norm: float
    norm_at_clip: float | None
    weight_norm: float
    ratio: float
    input_rms: float | None


@dataclass(frozen=True)
class BatchStepsFacts:
    """Repeated updates on one batch.

    Attributes:
        losses: The loss after each update.
        falls_at: The first factor of the learning rate at which the loss falls steadily; None without one.
    """

    experiment: ClassVar[str] = "batch_steps"
    losses: tuple[float, ...]
    falls_at: float | None


@dataclass(frozen=True)
class AgainFacts:
    """A replay compared with the recorded step and with a second replay.

    Attributes:
        same_losses: The replayed losses equal the recorded ones.
        tolerance: Relative difference that is allowed for a compiled model.
        same_twice: Both replays have equal losses.
        norm_then: Norm of the recorded gradients.
        norm_now: Norm of the replayed gradients.
        error: Error of the replay; None without one.
    """

    experiment: ClassVar[str] = "again"
    same_losses: bool
    tolerance: float
    same_twice: bool
    norm_then: float | None
    norm_now: float | None
    error: str | None


@dataclass(frozen=True)
class LoadedMomentsFacts:
    """Second moments of an optimizer before its first watched update, compared with the squared gradients there.

    Attributes:
        kind: Class of the optimizer.
        names: Names of the tensors.
        gaps: For each tensor, ``abs(log10(moment / squared gradient))``, largest first.
        matched: Mean of the gaps if moments and gradients of tensors with equal shape are matched by size instead.
    """

    experiment: ClassVar[str] = "moments"
    kind: str
    names: tuple[str, ...]
    gaps: tuple[float, ...]
    matched: float
