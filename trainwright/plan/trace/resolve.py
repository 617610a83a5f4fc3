"""Decides what a recipe leaves open before a run is built: micro-batch, activation checkpointing, optimizer offload.

The decision is a function of the recipe, the samples and the device that is passed, so that the same device gives
the same decision. A run stores it (``Resolved.to_json``), and a resumed run reads it back (``read_resolved``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainwright.assembly.assemble import Parts
from trainwright.errors import UsageError
from trainwright.plan.amounts import human_bytes
from trainwright.plan.batch import solve_batch
from trainwright.plan.checkpointing import Checkpointing, describe
from trainwright.plan.devices import Device
from trainwright.plan.layout import Choice, Layout, Option, choose, micro_sizes
from trainwright.plan.make import Note
from trainwright.plan.parallel import AXES, solve_layout
from trainwright.plan.trace.blueprint import Blueprint, make_blueprint
from trainwright.plan.trace.layouts import POLICIES, LayoutSurvey
from trainwright.plan.trace.many_ranks import spread
from trainwright.plan.trace.run_forecast import (
    can_offload,
    may_chunk,
    planner_for,
    precision_on,
    with_budget,
    with_offload,
)
from trainwright.recipe import Loaded, Recipe
from trainwright.recipe.formatting import parse_bytes
from trainwright.recipe.schema import PLANNED

CHECKPOINTING = "model.activation_checkpointing"


@dataclass(frozen=True)
class Resolved:
    """The recipe without ``auto`` in ``batch.micro``, ``optimizer.offload`` and ``parallel``.

    ``planned`` is the activation checkpointing for ``build_parts``, None if the recipe names a fixed policy.
    ``degrees`` is the degree of each axis, and ``chunked`` is True if the loss is computed in chunks. Each is None if
    it is not decided here.
    """

    loaded: Loaded
    planned: Checkpointing | None = None
    notes: tuple[Note, ...] = ()
    degrees: Mapping[str, int] | None = None
    chunked: bool | None = None

    def to_json(self) -> dict[str, object]:
        """Return the decision for plan.json, from which a resumed run reads it.

        ``recompute`` is activation checkpointing.
        """
        blocks = None if self.planned is None else [None if k is None else list(k) for k in self.planned.blocks]
        recipe = self.loaded.recipe
        settled: dict[str, object] = {
            "micro": recipe.batch.micro,
            "recompute": blocks,
            "offload": recipe.optimizer.offload,
        }
        if self.degrees is None:
            return settled
        return {**settled, "layout": self.degrees, "policy": recipe.model.activation_checkpointing}


def has_open_settings(recipe: Recipe, ranks: int = 1) -> bool:
    """Return True if the plan must decide anything before the model is built."""
    layout = ranks > 1 and recipe.parallel.open_axes
    return bool(layout) or "auto" in (recipe.batch.micro, recipe.optimizer.offload) or _is_checkpointing_planned(recipe)


def _is_checkpointing_planned(recipe: Recipe) -> bool:
    return recipe.model.activation_checkpointing not in POLICIES


def resolve(loaded: Loaded, device: Device, *, parts: Parts | None = None, ranks: int = 1) -> Resolved:
    """Decide what the recipe leaves open, for the free memory of ``device``. Costs nothing if nothing is open.

    There are ``ranks`` ranks with such a device each; they may divide the weights. ``by_plan`` of the returned recipe
    names the settings that were decided.

    Raises RecipeError for what cannot be built, UsageError when no choice fits the memory.
    """
    recipe = loaded.recipe
    if not has_open_settings(recipe, ranks):
        return Resolved(loaded)
    if ranks > 1 and (recipe.parallel.shard != 1 or recipe.parallel.open_axes):
        return _spread(loaded, device, ranks, parts)
    on_cpu = "cpu" in (device.kind, recipe.device)
    if on_cpu and recipe.batch.micro != "auto" and not _is_checkpointing_planned(recipe):
        why = "the device's memory is the host's"
        return Resolved(_with_decisions(loaded, offload=False), None, (Note("optimizer offload", "no", why),))
    blueprint, setting = make_blueprint(loaded, parts), recipe.model.activation_checkpointing
    movable = device if can_offload(loaded, device) and not on_cpu else None
    data_ranks = solve_layout(recipe, ranks).data if ranks > 1 else 1
    batch = solve_batch(recipe.batch.size, recipe.batch.micro, recipe.batch.accumulation, ranks=data_ranks)
    budget = device if setting in (*POLICIES, "auto") else with_budget(device, parse_bytes(setting))
    survey = LayoutSurvey(blueprint, device, precision_on(recipe, device))
    fixed = None if recipe.batch.micro == "auto" else batch.micro

    size, policies = -(-batch.size // data_ranks), (setting,) if setting in POLICIES else POLICIES

    def chosen(layouts: Sequence[Layout]) -> Choice:
        return choose(with_offload(recipe, layouts, movable, by_default=False), budget, size, micro=fixed)

    choice = chosen(survey.layouts(policies, micro_sizes(size) if fixed is None else [fixed]))
    if not choice.fits and not choice.best.layout.chunked and may_chunk(blueprint):
        choice = chosen(survey.layouts_of(policies, chunked=True))
    if not choice.fits:
        raise UsageError(
            f"no micro-batch fits: with {choice.best.layout.checkpointing} checkpointing and {choice.best.micro} "
            f"samples a step holds {human_bytes(choice.best.peak_bytes)}, and {human_bytes(budget.usable_bytes)} are "
            "usable",
            remedy="`trainwright plan RECIPE` lists what would make it fit",
        )
    best = choice.best
    planned = None
    open_topics = {"micro-batch": recipe.batch.micro, "optimizer offload": recipe.optimizer.offload}
    notes = [note for note in choice.notes if open_topics.get(note.topic) == "auto"]
    if setting not in POLICIES:
        planned, note = _plan_checkpointing(blueprint, survey, budget, best)
        notes.append(note)
    offload = best.layout.offload is not None if recipe.optimizer.offload == "auto" else None
    chunked = best.layout.chunked if may_chunk(blueprint) else None
    changed = _with_decisions(loaded, micro=best.micro, offload=offload, is_checkpointing_decided=planned is not None)
    return Resolved(changed, planned, tuple(notes), chunked=chunked)


def _spread(loaded: Loaded, device: Device, ranks: int, parts: Parts | None) -> Resolved:
    """Decide layout, micro-batch and activation checkpointing together."""
    recipe, setting = loaded.recipe, loaded.recipe.model.activation_checkpointing
    budget = device if setting in (*POLICIES, "auto") else with_budget(device, parse_bytes(setting))
    best, notes = spread(loaded, budget, ranks, parts=parts)
    degrees = {axis: getattr(best.degrees, axis) for axis in ("replicate", *PLANNED)}
    micro = best.micro if recipe.batch.micro == "auto" else None
    offload = False if recipe.optimizer.offload == "auto" else None
    changed = _with_decisions(_with_layout(loaded, degrees, best.policy), micro=micro, offload=offload)
    return Resolved(changed, None, notes, degrees)


def _with_layout(loaded: Loaded, degrees: Mapping[str, int], policy: str) -> Loaded:
    recipe = loaded.recipe
    parallel = recipe.parallel.model_copy(update=dict(degrees))
    model = recipe.model.model_copy(update={"activation_checkpointing": policy})
    by_plan = {f"parallel.{axis}" for axis in recipe.parallel.open_axes}
    by_plan |= {CHECKPOINTING} if _is_checkpointing_planned(recipe) else set()
    changed = recipe.model_copy(update={"parallel": parallel, "model": model})
    return replace(loaded, recipe=changed, by_plan=loaded.by_plan | by_plan)


def is_for(stored: Mapping[str, Any], recipe: Recipe, ranks: int) -> bool:
    """Return True if a stored decision is valid for ``ranks`` ranks. Without a layout, it is valid for any number."""
    if (layout := stored.get("layout")) is None:
        return True
    degrees = {axis: getattr(recipe.parallel, axis) for axis in AXES}
    return bool(math.prod(size for size in {**degrees, **layout}.values() if size != "auto") == ranks)


def read_resolved(loaded: Loaded, stored: Mapping[str, Any]) -> Resolved:
    """Return the decision stored by ``Resolved.to_json``."""
    blocks = stored.get("recompute")
    planned = None if blocks is None else Checkpointing(tuple(None if keep is None else tuple(keep) for keep in blocks))
    micro = stored["micro"] if loaded.recipe.batch.micro == "auto" else None
    offload = stored.get("offload", False) if loaded.recipe.optimizer.offload == "auto" else None
    if layout := stored.get("layout"):
        layout = {"context": 1, **layout} if loaded.recipe.parallel.context == "auto" else layout  # of an older version
        changed = _with_decisions(_with_layout(loaded, layout, stored["policy"]), micro=micro, offload=offload)
        return Resolved(changed, None, degrees=layout)
    changed = _with_decisions(loaded, micro=micro, offload=offload, is_checkpointing_decided=planned is not None)
    return Resolved(changed, planned)


def _plan_checkpointing(
    blueprint: Blueprint, survey: LayoutSurvey, budget: Device, best: Option
) -> tuple[Checkpointing, Note]:
    """Return no checkpointing if all activations fit, else the planner's choice by traced peaks for the micro-batch."""
    if best.layout.checkpointing == "none" or not survey.blocks:
        why = f"all activations fit: {human_bytes(best.peak_bytes)} of {human_bytes(budget.usable_bytes)} usable"
        return Checkpointing.none(survey.blocks), Note("checkpointing", "none", why)
    # The planner traces the optimizer's state on the device, even where it will be offloaded.
    spared = best.layout.offload.state_bytes if best.layout.offload else 0
    found = planner_for(blueprint, budget, best).choose(budget.usable_bytes + spared)
    held, usable = human_bytes(found.peak_bytes - spared), human_bytes(budget.usable_bytes)
    why = f"{describe(found.checkpointing)}; {held} of {usable} usable"
    return found.checkpointing, Note("checkpointing", f"{found.checkpointing.count} blocks", why)


def _with_decisions(
    loaded: Loaded, *, micro: int | None = None, offload: bool | None = None, is_checkpointing_decided: bool = False
) -> Loaded:
    """Return the recipe with these values; None leaves the recipe's value."""
    recipe, by_plan = loaded.recipe, set(loaded.by_plan)
    changed: dict[str, object] = {}
    if micro is not None:
        changed["batch"] = recipe.batch.model_copy(update={"micro": micro})
        by_plan |= {"batch.micro"} if recipe.batch.micro == "auto" else set()
    if offload is not None:
        changed["optimizer"] = recipe.optimizer.model_copy(update={"offload": offload})
        by_plan |= {"optimizer.offload"} if recipe.optimizer.offload == "auto" else set()
    if is_checkpointing_decided:
        by_plan.add(CHECKPOINTING)
    return replace(loaded, recipe=recipe.model_copy(update=changed), by_plan=frozenset(by_plan))
