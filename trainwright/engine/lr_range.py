"""The learning rate range test (Smith 2017, arXiv:1506.01186): grow the rate each step, watch the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.loop import steps
from trainwright.engine.loss import Loss
from trainwright.engine.precision import FP32, Precision
from trainwright.engine.step import make_step
from trainwright.engine.until import for_steps
from trainwright.optim.clip import ClipFn, no_clip

SMOOTHING = 0.9
DIVERGED = 4.0


@dataclass(frozen=True)
class LrRange:
    """``lrs`` and ``losses`` (smoothed) have one entry a step; ``suggestion`` is None if the loss never fell.

    ``stopped_at`` is the rate at which the loss passed 4 times its minimum, None when it never did.
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
    """Trains ``num_steps`` at rates from ``lowest`` to ``highest``, growing geometrically; uses ``state`` up.

    ``precision`` and ``clip`` are those of the training that the rate is for: clipping raises the rate that diverges.
    The losses are smoothed by a bias-corrected moving average; a host sync a step is what the test costs.
    """
    for group in state.optimizer.param_groups:  # every group keeps its ratio to the first
        group["initial_lr"] = group["lr"] / state.optimizer.param_groups[0]["lr"] * lowest
    growth = (highest / lowest) ** (1 / max(num_steps - 1, 1))
    advance = make_step(loss, schedule=lambda step, fraction: growth**step, precision=precision, clip=clip)
    lrs: list[float] = []
    losses: list[float] = []
    average, best = 0.0, math.inf
    for result in steps(state, batches, advance, until=for_steps(num_steps)):
        average = SMOOTHING * average + (1 - SMOOTHING) * float(result.loss)
        smooth = average / (1 - SMOOTHING**result.step)
        lrs.append(lowest * growth ** (result.step - 1))
        losses.append(smooth)
        best = min(best, smooth)
        if not math.isfinite(smooth) or smooth > best + (DIVERGED - 1) * abs(best):
            return LrRange(tuple(lrs), tuple(losses), suggest(lrs, losses), lrs[-1])
    return LrRange(tuple(lrs), tuple(losses), suggest(lrs, losses), None)


def suggest(lrs: list[float], losses: list[float]) -> float | None:
    """A tenth of the rate at the lowest loss (Smith's rule); None when the loss fell by less than 1 %."""
    finite = [(loss, lr) for loss, lr in zip(losses, lrs, strict=True) if math.isfinite(loss)]
    if not finite:
        return None
    lowest_loss, lr = min(finite)
    if lowest_loss > finite[0][0] - 0.01 * abs(finite[0][0]):
        return None
    return lr / 10
