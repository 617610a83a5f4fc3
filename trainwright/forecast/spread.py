"""Chooses the layout of a recipe over its ranks, with the micro-batch and the activation checkpointing."""

from __future__ import annotations

from trainwright.build.assemble import Parts
from trainwright.errors import UsageError
from trainwright.forecast.many_ranks import survey_ranks
from trainwright.plan.batch import solve_batch
from trainwright.plan.devices import Device
from trainwright.plan.explain import human_bytes
from trainwright.plan.make import Note
from trainwright.plan.many_ranks import (
    BUILT,
    ManyRanks,
    Placement,
    best_of,
    choice_notes,
    is_trainable,
    layouts_of,
)
from trainwright.plan.parallel import Degrees, solve_layout
from trainwright.plan.splits import require_fitting
from trainwright.recipe import Loaded, Recipe


def spread(
    loaded: Loaded, device: Device, ranks: int, *, parts: Parts | None = None
) -> tuple[Placement, tuple[Note, ...]]:
    """The layout of a recipe on ``ranks`` of a device, and why; what the recipe says is kept.

    Raises UsageError when no layout fits the memory.
    """
    many = survey_ranks(loaded, device, parts=parts, tensor=(loaded.recipe.parallel.tensor,))
    options = options_of(many, loaded.recipe, ranks)
    best = best_of(options)
    if not best.fits:
        raise UsageError(
            f"no layout of {ranks} ranks fits: {best.degrees} holds {human_bytes(best.peak_bytes)} a rank, and "
            f"{human_bytes(device.usable_bytes)} are usable",
            remedy=f"`trainwright plan RECIPE --ranks {ranks}` shows what each layout holds; or start more ranks",
        )
    return best, choice_notes(best, options, device)


def options_of(many: ManyRanks, recipe: Recipe, ranks: int) -> list[Placement]:
    """The layouts that a recipe allows, where it leaves something open, and in which it can be trained."""
    zero, setting, batch = (recipe.parallel.zero,), recipe.model.activation_checkpointing, recipe.batch
    found = []
    for degrees in _degrees(many, recipe, ranks):
        policies = [each for each in many.policies(degrees) if each == setting] or many.policies(degrees)
        if batch.micro == "auto":
            found += [each for each in many.all([degrees], zero) if each.policy in policies]
        else:
            micro = solve_batch(many.size, batch.micro, batch.accumulation, ranks=degrees.data).micro
            found += [many.place(degrees, zero[0], policy, micro) for policy in policies]
    return found


def _degrees(many: ManyRanks, recipe: Recipe, ranks: int) -> list[Degrees]:
    ask = recipe.parallel
    if ask.shard != "auto":
        degrees = solve_layout(recipe, ranks)
        require_fitting(recipe, degrees, many.shape)
        return [degrees]
    fixed = ("tensor", "pipeline", "context")
    candidates = [
        each
        for each in layouts_of(ranks, many, BUILT)
        if ask.replicate in ("auto", each.replicate) and all(getattr(each, a) == getattr(ask, a) for a in fixed)
    ]
    return [each for each in candidates if is_trainable(recipe, each, many.shape)] or [solve_layout(recipe, ranks)]
