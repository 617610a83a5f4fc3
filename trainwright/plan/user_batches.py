"""Validates recipes for data that the user provides as ready batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainwright.errors import Problem, RecipeError
from trainwright.recipe import Recipe


@dataclass(frozen=True)
class UserBatches:
    """Batches that the user's data come in: samples per batch if known, and batches per epoch.

    ``ready``: the user's iterator makes them, so no samples can be left out, and ranks share the rows of each batch.
    """

    size: int | None = None
    count: int | None = None
    ready: bool = False


def require_fits(recipe: Recipe, batches: UserBatches, ranks: int) -> None:
    """Raise RecipeError with every setting that such data cannot satisfy."""
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
