"""Chooses the layout of a recipe over its ranks, with the micro-batch and the activation checkpointing."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from trainwright.assembly.assemble import Parts
from trainwright.errors import UsageError
from trainwright.plan.batch import solve_batch
from trainwright.plan.degrees import AXES, Degrees
from trainwright.plan.devices import Device
from trainwright.plan.explain import human_bytes
from trainwright.plan.make import Note
from trainwright.plan.many_ranks import (
    SUPPORTED_AXES,
    ManyRanks,
    Placement,
    best_of,
    choice_notes,
    is_trainable,
    layouts_of,
)
from trainwright.plan.parallel import solve_layout
from trainwright.plan.splits import require_fitting
from trainwright.plan.trace.many_ranks import survey_ranks
from trainwright.recipe import Loaded, Recipe


def spread(
    loaded: Loaded, device: Device, ranks: int, *, parts: Parts | None = None
) -> tuple[Placement, tuple[Note, ...]]:
    """Return the layout of a recipe on ``ranks`` of a device, and the reasons. Fixed degrees are kept.

    Raises UsageError when no layout fits the memory.
    """
    many = survey_ranks(loaded, device, parts=parts, decides=True)
    if parts is not None and not _may_have_stages(parts):
        many = replace(many, shape=replace(many.shape, blocks=None))
    options = options_of(many, loaded.recipe, ranks)
    best = best_of(options)
    if not best.fits:
        raise UsageError(
            f"no layout of {ranks} ranks fits: {best.degrees} holds {human_bytes(best.peak_bytes)} a rank, and "
            f"{human_bytes(device.usable_bytes)} are usable",
            remedy=f"`trainwright plan RECIPE --ranks {ranks}` shows what each layout holds; or start more ranks",
        )
    return best, choice_notes(best, options, device)


def _may_have_stages(parts: Parts) -> bool:
    """Return True if the user's objects work with pipeline stages: a loss without weights, and batches of one size."""
    own = parts.train.own_batches
    trains = isinstance(parts.loss, nn.Module) and any(True for _ in parts.loss.parameters())
    return not trains and not (own is not None and own.ready)


def options_of(many: ManyRanks, recipe: Recipe, ranks: int) -> list[Placement]:
    """Return the layouts that a recipe allows and that the engine can train."""
    zero = (recipe.parallel.zero,)
    setting = recipe.model.activation_checkpointing
    batch = recipe.batch
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
    if not ask.open_axes:
        degrees = solve_layout(recipe, ranks)
        require_fitting(recipe, degrees, many.shape)
        return [degrees]
    candidates = [
        each
        for each in layouts_of(ranks, many, SUPPORTED_AXES)
        if all(getattr(ask, axis) in ("auto", getattr(each, axis)) for axis in AXES)
    ]
    return [each for each in candidates if is_trainable(recipe, each, many.shape)] or [solve_layout(recipe, ranks)]
