"""The batch equation: global batch = micro-batch x accumulation x ranks, any two given."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from trainwright.errors import Problem, RecipeError
from trainwright.plan.user_batches import UserBatches
from trainwright.recipe.schema import DEFAULT_BATCH_SIZE, Batch


@dataclass(frozen=True)
class BatchPlan:
    """One optimizer step of ``size`` samples. A rank computes ``accumulation`` micro-batches of at most ``micro``."""

    size: int
    micro: int
    accumulation: int
    ranks: int = 1


def batch_of(ask: Batch, user_batches: UserBatches | None, *, ranks: int = 1) -> BatchPlan:
    """Return the batch plan of a recipe.

    If the user's data come in batches (``user_batches``), each has their size: ``size`` is then nominal, 1 if unknown.

    Raises RecipeError when the recipe contradicts itself.
    """
    if user_batches is None:
        return solve_batch(ask.size, ask.micro, ask.accumulation, ranks=ranks)
    size, joined = user_batches.size or 1, ask.accumulation or 1
    micro = size if ask.micro is None or ask.micro == "auto" or user_batches.ready else min(ask.micro, size)
    return BatchPlan(size * joined, micro, _ceil(size, micro) * joined, ranks)


def solve_batch(
    size: int | None, micro: int | Literal["auto"] | None, accumulation: int | None, *, ranks: int = 1
) -> BatchPlan:
    """Fill in what is None. If the global batch is not a multiple, the last micro-batch is shorter.

    An unresolved ``micro`` of ``auto`` is the full batch of a rank.

    Raises RecipeError when all three are set and contradict each other.
    """
    micro = None if micro == "auto" else micro
    if size is None:
        size = micro * (accumulation or 1) * ranks if micro else DEFAULT_BATCH_SIZE
    per_rank = _ceil(size, ranks)
    if micro is None:
        micro = _ceil(per_rank, accumulation or 1)
    needed = _ceil(per_rank, micro)
    if accumulation is not None and accumulation != needed:
        raise RecipeError(
            Problem(
                "batch",
                f"size {size} = micro {micro} x accumulation {accumulation} x ranks {ranks} does not hold",
                remedy=f"leave accumulation out (it would be {needed}), or set size to {micro * accumulation * ranks}",
            )
        )
    return BatchPlan(size, micro, needed, ranks)


def scale_lr(lr: float, *, rule: Literal["linear", "sqrt"], batch: int, base_batch: int) -> float:
    """Return the learning rate for ``batch`` samples per step, when ``lr`` was tuned for ``base_batch``.

    linear: Goyal et al. 2017, arXiv:1706.02677, for SGD. sqrt: Krizhevsky 2014, arXiv:1404.5997, and for
    adaptive optimizers Malladi et al. 2022, arXiv:2205.10287.
    """
    ratio = batch / base_batch
    return lr * (ratio if rule == "linear" else math.sqrt(ratio))


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
