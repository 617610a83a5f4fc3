"""The learning rate range test (Smith 2017, arXiv:1506.01186): raise the learning rate each step, watch the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.loop import for_steps, steps
from trainwright.engine.loss import Loss
from trainwright.engine.precision import FP32, Precision
from trainwright.engine.step import make_step
from trainwright.optim.clip import ClipFn, no_clip

LOSS_SMOOTHING = 0.9  # weight of the previous losses in the moving average
DIVERGED_LOSS_RATIO = 4.0  # smoothed loss / lowest smoothed loss at which the test ends


@dataclass(frozen=True)
class LrRange:
    """Result of a learning rate range test.

    Attributes:
        lrs: Learning rate of each step.
        losses: Smoothed loss of each step.
        suggestion: Suggested learning rate; None if the loss fell by less than 1 %.
        stopped_at: Learning rate at which the loss exceeded 4 times its minimum; None if it never did.
    """

    lrs: tuple[float, ...]
    losses: tuple[float, ...]
    suggestion: float | None
    stopped_at: float | None


def lr_range(
    state: TrainState,
    batches: Iterable[StepBatch],
    loss: Callable[..., Loss | Tensor],
    *,
    lowest: float = 1e-6,
    highest: float = 10.0,
    num_steps: int = 100,
    precision: Precision = FP32,
    clip: ClipFn = no_clip,
) -> LrRange:
    """Train ``num_steps`` at learning rates from ``lowest`` to ``highest``, growing geometrically. Changes ``state``.

    The losses are smoothed by a bias-corrected moving average. Costs one host sync per step. ``clip`` raises the
    learning rate at which training diverges, so pass that of the planned training.
    """
    for group in state.optimizer.param_groups:  # every group keeps its ratio to the first
        group["initial_lr"] = group["lr"] / state.optimizer.param_groups[0]["lr"] * lowest
    growth = (highest / lowest) ** (1 / max(num_steps - 1, 1))
    advance = make_step(loss, schedule=lambda step, _fraction: growth**step, precision=precision, clip=clip)
    lrs: list[float] = []
    losses: list[float] = []
    average, best = 0.0, math.inf
    for result in steps(state, batches, advance, until=for_steps(num_steps)):
        average = LOSS_SMOOTHING * average + (1 - LOSS_SMOOTHING) * float(result.loss)
        smooth = average / (1 - LOSS_SMOOTHING**result.step)
        lrs.append(lowest * growth ** (result.step - 1))
        losses.append(smooth)
        best = min(best, smooth)
        if not math.isfinite(smooth) or smooth > best + (DIVERGED_LOSS_RATIO - 1) * abs(best):
            return LrRange(tuple(lrs), tuple(losses), suggest(lrs, losses), lrs[-1])
    return LrRange(tuple(lrs), tuple(losses), suggest(lrs, losses), None)


def suggest(lrs: list[float], losses: list[float]) -> float | None:
    """Return a tenth of the rate at the lowest loss (Smith's rule); None if the loss fell by less than 1 %."""
    finite = [(loss, lr) for loss, lr in zip(losses, lrs, strict=True) if math.isfinite(loss)]
    if not finite:
        return None
    lowest_loss, lr = min(finite)
    if lowest_loss > finite[0][0] - 0.01 * abs(finite[0][0]):
        return None
    return lr / 10
