"""The batch equation: global batch = micro-batch x accumulation x ranks, any two given."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trainwright.errors import Problem, RecipeError
from trainwright.recipe import Recipe
from trainwright.recipe.schema import DEFAULT_BATCH_SIZE, Batch


@dataclass(frozen=True)
class UserBatches:
    """The batches in which the user's data come: samples per batch if known, and batches per epoch.

    ``ready``: the user's iterator makes them, so no samples can be left out, and ranks share the rows of each batch.
    """

    size: int | None = None
    count: int | None = None
    ready: bool = False


def require_fits(recipe: Recipe, batches: UserBatches, ranks: int) -> None:
    """Raise RecipeError with every setting that the user's batches cannot satisfy."""
    if problems := list(_problems(recipe, batches, ranks)):
        raise RecipeError(problems)


def _problems(recipe: Recipe, batches: UserBatches, ranks: int) -> Iterator[Problem]:
    batch, rule = recipe.batch, recipe.optimizer.lr_rule
    if rule.rule != "none" and batches.size is None:
        why = "needs a batch size, and how many samples a batch of these data has is not known"
        yield Problem("optimizer.lr_rule", why, got=rule.rule, remedy="set optimizer.lr to what suits their batches")
    if not batches.ready:
        return
    if recipe.parallel.exact:
        why = "cannot be true for ready batches: there is no size of a slice that is the same on any number of ranks"
        yield Problem("parallel.exact", why, got="true", remedy="leave it out, or give a Dataset of samples")
    if ranks > 1 and recipe.parallel.pipeline not in (1, "auto"):
        why = "was not shown to work with ready batches, which are not of one size"
        remedy = "give a Dataset or an IterableDataset of samples, or use parallel.shard"
        yield Problem("parallel.pipeline", why, got=str(recipe.parallel.pipeline), remedy=remedy)
    if isinstance(batch.micro, int):
        why = "cannot be chosen for ready batches: each is one micro-batch, of the size that the data have"
        yield Problem("batch.micro", why, got=str(batch.micro), remedy="leave it out, and make smaller batches")
    if recipe.data.quarantine:
        why = "cannot be set for ready batches: samples are not left out of them"
        yield Problem("data.quarantine", why, remedy="leave the samples out where the batches are made")


@dataclass(frozen=True)
class BatchPlan:
    """One optimizer step of ``size`` samples. A rank computes ``accumulation`` micro-batches of at most ``micro``."""

    size: int
    micro: int
    accumulation: int
    ranks: int = 1

    @property
    def how(self) -> str:
        """The product that ``size`` equals, or the size of the micro-batches if the last one is shorter."""
        if self.size == self.micro * self.accumulation * self.ranks:
            return f"= {self.micro} x {self.accumulation} x {self.ranks} (micro-batch x accumulation x ranks)"
        return f"in micro-batches of at most {self.micro}: accumulation {self.accumulation}, ranks {self.ranks}"


def batch_of(batch: Batch, user_batches: UserBatches | None, *, ranks: int = 1) -> BatchPlan:
    """Return the batch plan of a recipe.

    If the user's data come in batches (``user_batches``), steps consist of these batches. If their size is unknown,
    the plan counts 1 sample per batch.

    Raises RecipeError when the recipe contradicts itself.
    """
    if user_batches is None:
        return solve_batch(batch.size, batch.micro, batch.accumulation, ranks=ranks)
    size, joined = user_batches.size or 1, batch.accumulation or 1
    micro = size if batch.micro is None or batch.micro == "auto" or user_batches.ready else min(batch.micro, size)
    return BatchPlan(size * joined, micro, -(-size // micro) * joined, ranks)


def solve_batch(
    size: int | None, micro: int | Literal["auto"] | None, accumulation: int | None, *, ranks: int = 1
) -> BatchPlan:
    """Fill in what is None. If ``size`` is not a multiple of micro-batch and ranks, the last micro-batch is shorter.

    An unresolved ``micro`` of ``auto`` is the batch of a rank, divided by ``accumulation`` if it is set.

    Raises RecipeError when all three are set and contradict each other.
    """
    micro = None if micro == "auto" else micro
    if size is None:
        size = micro * (accumulation or 1) * ranks if micro else DEFAULT_BATCH_SIZE
    per_rank = -(-size // ranks)
    if micro is None:
        micro = -(-per_rank // (accumulation or 1))
    needed = -(-per_rank // micro)
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
