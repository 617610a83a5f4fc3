"""Limits of a run with a custom step, ``tw.fit(..., advance=step)``, and its plan without a dry run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from trainwright.assembly.assemble import Parts
from trainwright.engine.loss import Batch, Loss
from trainwright.errors import UsageError
from trainwright.plan.make import Note, Plan
from trainwright.recipe import Loaded, Recipe

FULL_PRECISIONS = (None, "auto", "fp32", "tf32")
"""Settings of ``precision`` that need no autocast."""


def no_loss(model: nn.Module, batch: Batch) -> Loss:  # noqa: ARG001 - see ``takes_model``
    """Stand for the loss of a run that has none. Raises UsageError when called."""
    raise UsageError(
        "the run has a custom step and no loss to evaluate with",
        remedy="pass both: tw.fit(model, data, loss, advance=step)",
    )


def require_no_loss_needed(recipe: Recipe) -> None:
    """Raise UsageError if a run without a loss has a validation set."""
    if recipe.data.val is not None:
        no_loss(nn.Module(), None)


def require_loss(parts: Parts | None, verb: str) -> None:
    """Raise UsageError for a run with a custom step and no loss."""
    if parts is not None and parts.loss is no_loss:
        raise UsageError(
            f"{verb} needs a loss, and this run has only a custom step (advance=)",
            remedy="pass the loss that the step computes: loss=...",
        )


def require_custom_step_fits(loaded: Loaded, ranks: int) -> None:
    """Raise UsageError for settings that the engine cannot apply within a custom step."""
    recipe, clip = loaded.recipe, loaded.recipe.optimizer.clip
    asks_to_clip = any(path.startswith("optimizer.clip") for path in loaded.stated)
    for wrong, words, remedy in (
        (ranks > 1, f"it runs in {ranks} processes", "run it in one, or pass a loss instead"),
        (
            recipe.precision not in FULL_PRECISIONS,
            f"precision is {recipe.precision}",
            "leave it out and open torch.autocast inside of the step",
        ),
        (
            asks_to_clip and clip.by != "none",
            f"clipping by {clip.by} is set",
            "leave it out and clip in the step: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        ),
        (
            recipe.spikes.policy not in ("warn", "off"),
            f"spikes.policy is {recipe.spikes.policy}",
            "set it to warn: only the step itself knows which update it could leave out",
        ),
    ):
        if wrong:
            raise UsageError(f"a custom step (advance=) does not work if {words}", remedy=remedy)


def without_dry_run(plan: Plan, recipe: Recipe) -> Plan:
    """Return the plan of a custom step. It has no dry run, because the step updates the weights."""
    return replace(plan, precision="tf32" if recipe.precision == "tf32" else "fp32", notes=(*plan.notes, *_notes()))


def _notes() -> Iterator[Note]:
    yield Note(
        "dry run", "none", "a custom step updates the weights, so it has no dry run: no times, no memory, no first loss"
    )
    yield Note("precision", "fp32", "a custom step opens torch.autocast itself")
