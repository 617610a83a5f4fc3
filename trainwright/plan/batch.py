"""The batch equation: global batch = micro-batch x accumulation x ranks, any two given."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.errors import Problem, RecipeError

DEFAULT_SIZE = 32


@dataclass(frozen=True)
class BatchPlan:
    """``size`` samples an optimizer step; each rank takes ``accumulation`` micro-batches of ``micro`` or less."""

    size: int
    micro: int
    accumulation: int
    ranks: int = 1


def solve_batch(size: int | None, micro: int | None, accumulation: int | None, *, ranks: int = 1) -> BatchPlan:
    """Fills in what is not given. A global batch that does not divide ends in one short micro-batch.

    Raises RecipeError when all three are given and contradict each other.
    """
    if size is None:
        size = micro * (accumulation or 1) * ranks if micro else DEFAULT_SIZE
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


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
