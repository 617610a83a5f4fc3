"""The rungs of a ladder: the change of each to the recipe, and reasons to skip it. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from trainwright.errors import UsageError, require_choice
from trainwright.plan.batch import batch_of
from trainwright.recipe import Recipe
from trainwright.recipe.duration import Duration

Kind = Literal["numerics", "optimizer", "batch"]
BASELINE, SECOND_SEED = "fp32", "fp32-seed"
PRECISIONS = ("bf16", "fp16", "fp8")
OPTIMIZERS: Mapping[str, str] = {
    "sgd": "{momentum: 0.9}",
    "adamw": "{}",
    "muon": "{adjust_lr: match_rms_adamw}",
}
"""Optimizers in the order of trials, each with its arguments. With ``match_rms_adamw`` one learning rate fits all
groups of Muon."""
FACTORS = (2, 4)
"""Batch sizes to try, relative to the recipe's."""
LARGEST_FACTOR = max(FACTORS)
LINEAR_RULE = ("sgd", "lars")
"""Optimizers whose learning rate is scaled linearly with the batch size. Others are scaled with its square root."""
WARMUP = "0.05run"
"""Warm-up of a larger batch if the recipe has none."""
NAMES = (*PRECISIONS, "compile", *OPTIMIZERS, "checkpointing", *(f"batch-x{factor}" for factor in FACTORS))
"""The names of the rungs above the baseline, in order."""
DEFAULT_STEPS = 200
MIN_STEPS = 16

Settings = Mapping[str, str]
"""Overrides: YAML values by path."""


@dataclass(frozen=True)
class Rung:
    """One change to the rung below. ``name`` is one of ``NAMES``.

    A ``numerics`` rung must preserve the loss. An ``optimizer`` rung tries an optimizer with its own learning rate. A
    ``batch`` rung must preserve the loss at the same number of samples. ``why_not`` is the reason to skip it, or "".
    ``factor`` is the number of samples in a step, relative to the recipe.
    """

    name: str
    kind: Kind
    settings: Settings = field(default_factory=dict)
    why_not: str = ""
    factor: int = 1


def rungs_of(recipe: Recipe, skip: Sequence[str] = ()) -> Iterator[Rung]:
    """Yield the rungs above the baseline in order. Raises UsageError for an unknown name in ``skip``."""
    for name in skip:
        require_choice("rung", name, NAMES)
    for rung in _all(recipe):
        yield Rung(rung.name, rung.kind, why_not="skipped, as requested") if rung.name in skip else rung


def _all(recipe: Recipe) -> Iterator[Rung]:
    for name in PRECISIONS:
        yield Rung(name, "numerics", {"precision": name})
    yield Rung("compile", "numerics", {"model.compile": "true"})
    has_rates = any(group.lr is not None for group in recipe.optimizer.groups)
    for name, args in OPTIMIZERS.items():
        why_not = "the optimizer of the recipe" if name == recipe.optimizer.use else ""
        why_not = why_not or ("optimizer.groups sets learning rates" if has_rates else "")
        settings = {"optimizer.use": name, "optimizer.args": args, "optimizer.weight_decay": "null"}
        yield Rung(name, "optimizer", settings, why_not)
    checkpointing = recipe.model.activation_checkpointing
    why_not = "" if checkpointing == "none" else f"the recipe has activation_checkpointing: {checkpointing}"
    yield Rung("checkpointing", "numerics", {"model.activation_checkpointing": "block"}, why_not)
    for factor in FACTORS:
        yield Rung(f"batch-x{factor}", "batch", factor=factor)


def batch_settings(recipe: Recipe, factor: int, optimizer: str) -> Settings:
    """Return the settings of a batch ``factor`` times the recipe's, with the learning rate scaled accordingly."""
    batch = batch_of(recipe.batch, None).size
    settings = {"batch.size": str(batch * factor), "batch.accumulation": "null"}
    if recipe.optimizer.lr_rule.rule == "none":
        settings["optimizer.lr_rule.rule"] = "linear" if optimizer in LINEAR_RULE else "sqrt"
        settings["optimizer.lr_rule.base_batch"] = str(batch)
    if not recipe.schedule.warmup.value:
        settings["schedule.warmup"] = WARMUP
    return settings


def steps_of(recipe: Recipe, steps: int | None, samples: int | None) -> int:
    """Return the steps of the baseline: a multiple of 4, so that larger batches train on as many samples.

    Default: the recipe's steps, from ``MIN_STEPS`` to ``DEFAULT_STEPS``. Raises UsageError if fewer are given.
    """
    if steps is not None and samples is not None:
        raise UsageError("--steps and --samples both set the length of a rung", remedy="give one of them")
    if samples is not None:
        steps = samples // batch_of(recipe.batch, None).size
    elif steps is None:
        of_recipe = int(recipe.until.value) if recipe.until.unit == "steps" else DEFAULT_STEPS
        steps = max(MIN_STEPS, min(of_recipe, DEFAULT_STEPS))
    if steps < MIN_STEPS:
        raise UsageError(f"{steps} steps are too few to compare losses", remedy=f"at least {MIN_STEPS} steps")
    return -(-steps // LARGEST_FACTOR) * LARGEST_FACTOR


def length_settings(recipe: Recipe, steps: int, factor: int = 1) -> Settings:
    """Return the settings of a run on the samples of ``steps`` baseline steps.

    A warm-up in the unit of ``until`` keeps its fraction of the run.
    """
    settings = {"until": f"{steps // factor}steps"}
    warmup = recipe.schedule.warmup
    if warmup.value and warmup.unit == recipe.until.unit:
        settings["schedule.warmup"] = f"{warmup.value / recipe.until.value:.12g}run"
    return settings


def divided_length(recipe: Recipe, factor: int) -> Settings:
    """Return settings that divide the recipe's steps and warm-up by ``factor``; none if its length is not in steps."""
    if factor == 1 or recipe.until.unit != "steps":
        return {}
    settings = {"until": str(Duration(-(-recipe.until.value // factor), "steps"))}
    if recipe.schedule.warmup.unit == "steps" and recipe.schedule.warmup.value:
        settings["schedule.warmup"] = str(Duration(-(-recipe.schedule.warmup.value // factor), "steps"))
    return settings


def words(settings: Settings) -> list[str]:
    """Return the settings as arguments of ``--set``."""
    return [f"{path}={value}" for path, value in settings.items()]
