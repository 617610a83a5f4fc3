"""A run whose step is the user's own, ``tw.fit(..., advance=step)``: what it cannot have, what is not known of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from trainwright.assembly.assemble import Parts
from trainwright.engine.loss import Batch, Loss
from trainwright.errors import UsageError
from trainwright.plan.make import Note, Plan
from trainwright.recipe import Loaded, Recipe

FULL = (None, "auto", "fp32", "tf32")


def no_loss(model: nn.Module, batch: Batch) -> Loss:
    """Stands for the loss of a run that has none."""
    raise UsageError(
        "the run has a step of its own, and no loss to evaluate with",
        remedy="give both: tw.fit(model, data, loss, advance=step)",
    )


def require_no_loss_needed(recipe: Recipe) -> None:
    """Raises UsageError where a run without a loss is to evaluate."""
    if recipe.data.val is not None:
        no_loss(nn.Module(), None)


def require_loss(parts: Parts | None, verb: str) -> None:
    """Raises UsageError for a run that has a step of its own and no loss."""
    if parts is not None and parts.loss is no_loss:
        raise UsageError(
            f"{verb} needs a loss, and this run has only a step of its own (advance=)",
            remedy="give the loss that the step computes: loss=...",
        )


def require_own_step_fits(loaded: Loaded, ranks: int) -> None:
    """Raises UsageError for what a recipe asks of the step that the engine cannot do within one of the user's own."""
    recipe, clip = loaded.recipe, loaded.recipe.optimizer.clip
    asks_to_clip = any(path.startswith("optimizer.clip") for path in loaded.stated)
    for wrong, words, remedy in (
        (ranks > 1, f"it runs in {ranks} processes", "run it in one, or give a loss instead"),
        (
            recipe.precision not in FULL,
            f"precision is {recipe.precision}",
            "leave it out and open torch.autocast inside of the step",
        ),
        (
            asks_to_clip and clip.by != "none",
            f"clipping by {clip.by} is asked for",
            "leave it out and clip in the step: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        ),
        (
            recipe.spikes.policy not in ("warn", "off"),
            f"spikes.policy is {recipe.spikes.policy}",
            "set it to warn: only the step itself knows which update it could leave out",
        ),
    ):
        if wrong:
            raise UsageError(f"a step of your own (advance=) does not work where {words}", remedy=remedy)


def untried(plan: Plan, recipe: Recipe) -> Plan:
    """The plan of a step that was not tried beforehand: it updates the weights."""
    return replace(plan, precision="tf32" if recipe.precision == "tf32" else "fp32", notes=(*plan.notes, *_notes()))


def _notes() -> Iterator[Note]:
    yield Note("dry run", "none", "a step of your own is not tried beforehand: no times, no memory, no first loss")
    yield Note("precision", "fp32", "a step of your own opens torch.autocast where it wants it")
