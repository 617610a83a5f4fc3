"""``verify packing``: compares the samples of the first packed batch of a recipe with the same samples alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainwright.assembly.assemble import build_parts
from trainwright.data.loading import Loading, StepBatches
from trainwright.distributed import choose_device
from trainwright.errors import Problem, RecipeError, UsageError
from trainwright.finetune.isolation import Isolation, compare_alone
from trainwright.plan.batch import solve_batch
from trainwright.plan.parallel import in_one_process
from trainwright.recipe import load

PLAIN = ("model.activation_checkpointing=none", "model.compile=false")
"""Checkpointing and compilation are off: they would need a plan and a compiler, and do not change logits."""


def verify_packing(recipe: Path, *, settings: Sequence[str] = ()) -> Isolation:
    """Compare each sample of the first micro-batch with the sample alone. Nothing is trained.

    Raises RecipeError for a recipe without packing.
    """
    loaded = in_one_process(load(recipe, overrides=[*settings, *PLAIN]))
    content = loaded.recipe
    if content.data.packing.by == "none":
        rule, remedy = "is none, so no samples share a row", "write packing: padding_free"
        raise RecipeError(Problem("data.packing", rule, remedy=remedy, where=loaded.source.where("data.packing")))
    device = choose_device(content.device)
    parts = build_parts(loaded, device)
    micro = solve_batch(content.batch.size, content.batch.micro, content.batch.accumulation).micro
    loading = Loading(
        micro, micro, seed=content.seed, shuffle=content.data.shuffle, device=device, collate=parts.train.collate
    )
    first = next(iter(StepBatches(parts.train.dataset, loading)), None)
    if first is None:
        raise UsageError("the training data gave no batch", remedy="check that it is not empty")
    return compare_alone(parts.model, first.micro[0].data)
