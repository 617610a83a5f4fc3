"""Data that come in batches of their own: what a recipe can ask of them, and what it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainwright.errors import Problem, RecipeError
from trainwright.recipe import Recipe


@dataclass(frozen=True)
class OwnBatches:
    """Batches that the data come in: samples of each, as far as that is known, and how many an epoch has.

    ``ready``: they are made by the user's own iterator, so nothing can be left out of them and no rank has a share.
    """

    size: int | None = None
    count: int | None = None
    ready: bool = False


def require_fits(recipe: Recipe, own: OwnBatches, ranks: int) -> None:
    """Raises RecipeError with everything that a recipe asks and such data cannot give."""
    if problems := list(_problems(recipe, own, ranks)):
        raise RecipeError(problems)


def _problems(recipe: Recipe, own: OwnBatches, ranks: int) -> Iterator[Problem]:
    batch, rule = recipe.batch, recipe.optimizer.lr_rule
    if rule.rule != "none" and own.size is None:
        why = "needs a batch size, and how many samples a batch of these data has is not known"
        yield Problem("optimizer.lr_rule", why, got=rule.rule, remedy="set optimizer.lr to what suits their batches")
    if not own.ready:
        return
    if ranks > 1:
        why = f"is a stream of ready batches, which {ranks} ranks cannot share: each would train on all of it"
        yield Problem(
            "data.train", why, remedy="give a Dataset or an IterableDataset of samples, or train in one process"
        )
    if isinstance(batch.micro, int):
        why = "cannot be chosen for ready batches: each is one micro-batch, of the size that it comes in"
        yield Problem("batch.micro", why, got=str(batch.micro), remedy="leave it out, and make smaller batches")
    if recipe.data.quarantine:
        why = "cannot be set for ready batches: samples are not left out of them"
        yield Problem("data.quarantine", why, remedy="leave the samples out where the batches are made")
