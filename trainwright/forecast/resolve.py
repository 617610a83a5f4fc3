"""What a recipe leaves to the plan, decided before a run is built: the micro-batch, what is computed again, and where
the optimizer's state is.

A pure function of the recipe, the samples and the device that it is given: a run keeps what was decided, or gives the
same device again. Composition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainwright.build.assemble import Parts
from trainwright.errors import RecipeError, UsageError
from trainwright.forecast.blueprint import Blueprint, blueprint
from trainwright.forecast.layouts import CHECKPOINTING, LayoutSurvey
from trainwright.forecast.run_forecast import among, can_offload, planner_for, precision_on, within
from trainwright.plan.batch import solve_batch
from trainwright.plan.checkpointing import Checkpointing, describe
from trainwright.plan.devices import Device
from trainwright.plan.explain import human_bytes
from trainwright.plan.layout import Choice, Option, choose, offloaded
from trainwright.plan.make import Note
from trainwright.recipe import Loaded, Recipe
from trainwright.recipe.byte_size import parse_bytes


@dataclass(frozen=True)
class Resolved:
    """The recipe without ``auto`` in ``batch.micro`` and ``optimizer.offload``; ``planned`` for ``build_parts`` where
    that was asked for."""

    loaded: Loaded
    planned: Checkpointing | None = None
    notes: tuple[Note, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """What a run keeps, so that a resumed one does the same: see ``resolved_before``."""
        blocks = None if self.planned is None else [None if k is None else list(k) for k in self.planned.blocks]
        recipe = self.loaded.recipe
        return {"micro": recipe.batch.micro, "recompute": blocks, "offload": recipe.optimizer.offload}


def left_open(recipe: Recipe) -> bool:
    """Whether the recipe leaves anything to the plan that must be decided before the model is built."""
    return "auto" in (recipe.batch.micro, recipe.optimizer.offload) or _recomputes_by_plan(recipe)


def _recomputes_by_plan(recipe: Recipe) -> bool:
    return recipe.model.activation_checkpointing not in CHECKPOINTING


def resolve(loaded: Loaded, device: Device, *, parts: Parts | None = None, ranks: int = 1) -> Resolved:
    """Decides what the recipe leaves open, for what ``device`` has free. Costs nothing where nothing is open.

    Raises RecipeError for what cannot be built, UsageError when no choice fits the memory.
    """
    recipe = loaded.recipe
    if not left_open(recipe):
        return Resolved(loaded)
    on_cpu = "cpu" in (device.kind, recipe.device)
    if on_cpu and recipe.batch.micro != "auto" and not _recomputes_by_plan(recipe):
        why = "the device's memory is the host's"
        return Resolved(_decided(loaded, offload=False), None, (Note("optimizer offload", "no", why),))
    plan, asked = blueprint(loaded, parts), recipe.model.activation_checkpointing
    may_offload = can_offload(loaded, device) and not on_cpu
    batch = solve_batch(recipe.batch.size, recipe.batch.micro, recipe.batch.accumulation, ranks=ranks)
    budget = device if asked in (*CHECKPOINTING, "auto") else within(device, parse_bytes(asked))
    survey = LayoutSurvey(plan, device, precision_on(recipe, device))
    ways = survey.ways((asked,) if asked in CHECKPOINTING else CHECKPOINTING)
    moved = offloaded(ways, device) if may_offload else []
    ways = among(recipe, ways, moved, when_unasked=False)
    fixed = None if recipe.batch.micro == "auto" else batch.micro
    per_rank = -(-batch.size // ranks)
    choice = choose(ways, budget, per_rank, micro=fixed)
    if not choice.fits:
        raise _too_large(choice, budget)
    best, notes = choice.best, [choice.notes[0]] if fixed is None else []
    if recipe.optimizer.offload == "auto":
        notes += [note for note in choice.notes if note.topic == "optimizer offload"]
    planned = None
    if asked not in CHECKPOINTING:
        planned, note = _planned(plan, survey, budget, best)
        notes.append(note)
    offload = best.way.offload is not None if recipe.optimizer.offload == "auto" else None
    return Resolved(_decided(loaded, micro=best.micro, offload=offload), planned, tuple(notes))


def resolved_before(loaded: Loaded, kept: Mapping[str, Any]) -> Resolved:
    """What ``resolve`` gave, from ``Resolved.to_json()``."""
    blocks = kept.get("recompute")
    planned = None if blocks is None else Checkpointing(tuple(None if keep is None else tuple(keep) for keep in blocks))
    micro = kept["micro"] if loaded.recipe.batch.micro == "auto" else None
    offload = kept.get("offload", False) if loaded.recipe.optimizer.offload == "auto" else None
    return Resolved(_decided(loaded, micro=micro, offload=offload), planned)


def _planned(plan: Blueprint, survey: LayoutSurvey, budget: Device, best: Option) -> tuple[Checkpointing, Note]:
    """What to compute again in that micro-batch: nothing if all fits, else the planner's choice by true peaks."""
    if best.way.checkpointing == "none" or not survey.blocks:
        why = f"all activations fit: {human_bytes(best.peak_bytes)} of {human_bytes(budget.usable_bytes)} usable"
        return Checkpointing.none(survey.blocks), Note("checkpointing", "none", why)
    spared = best.way.offload.state_bytes if best.way.offload else 0  # the planner traces it on the device
    found = planner_for(plan, budget, best).choose(budget.usable_bytes + spared)
    held, usable = human_bytes(found.peak_bytes - spared), human_bytes(budget.usable_bytes)
    why = f"{describe(found.recompute)}; {held} of {usable} usable"
    return found.recompute, Note("checkpointing", f"{found.recompute.count} blocks", why)


def _decided(loaded: Loaded, *, micro: int | None = None, offload: bool | None = None) -> Loaded:
    """The recipe with these in the place of what it says; None leaves it."""
    recipe = loaded.recipe
    changed: dict[str, Any] = {}
    if micro is not None:
        changed["batch"] = recipe.batch.model_copy(update={"micro": micro})
    if offload is not None:
        changed["optimizer"] = recipe.optimizer.model_copy(update={"offload": offload})
    return replace(loaded, recipe=recipe.model_copy(update=changed)) if changed else loaded


def _too_large(choice: Choice, device: Device) -> UsageError | RecipeError:
    best = choice.best
    return UsageError(
        f"no micro-batch fits: with {best.way.checkpointing} checkpointing and {best.micro} samples a step holds "
        f"{human_bytes(best.peak_bytes)}, and {human_bytes(device.usable_bytes)} are usable",
        remedy="`trainwright plan RECIPE` lists what would make it fit",
    )
