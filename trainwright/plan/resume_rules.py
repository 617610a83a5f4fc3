"""Rules that classify each recipe key changed on resume: safe, changes the maths, or fatal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from trainwright.plan.batch import solve_batch
from trainwright.recipe import Duration, optimizer_row

Kind = Literal["safe", "maths", "fatal"]
Verdict = tuple[Kind, str]
"""A class and its reason."""
RecipeValue: TypeAlias = Any
"""A value of a recipe, of the type that the schema gives its path: a number, text, a list, a mapping or None."""
RecipeJson: TypeAlias = Mapping[str, RecipeValue]
"""A recipe as ``recipe.model_dump(mode="json")`` gives it."""


@dataclass(frozen=True)
class RecipeDifference:
    """One path whose values differ between two recipes, with the recipes. ``step`` is the number of completed steps."""

    path: str
    was: RecipeValue
    now: RecipeValue
    before: RecipeJson
    after: RecipeJson
    step: int


def classify(found: RecipeDifference) -> Verdict:
    """Return the class of a difference and its reason, by the rule with the longest path that covers it."""
    keys = found.path.split(".")
    above = (".".join(keys[:length]) for length in range(len(keys), 0, -1))
    rule = next((RULES[path] for path in above if path in RULES), UNKNOWN)
    return rule(found) if callable(rule) else rule


def _until(found: RecipeDifference) -> Verdict:
    was, now = Duration.parse(found.was), Duration.parse(found.now)
    if now.unit == "steps" and now.value <= found.step:
        return "fatal", f"step {found.step} is reached already: give more than {found.step}steps"
    if now.unit != was.unit:
        return "maths", "counted in another unit: the run ends, and its learning rate decays, elsewhere"
    if now.value < was.value:
        return "maths", "the run ends, and its learning rate decays, earlier"
    return "safe", "the run continues from its step; the warm-up stays, and a decay of the learning rate ends later"


def _packing(found: RecipeDifference) -> Verdict:
    ways = [recipe["data"].get("packing", {}).get("by") for recipe in (found.before, found.after)]
    if "bfd" in ways:
        return "maths", "rows hold other samples, so batch.size counts something else and the next epoch begins at once"
    return "safe", "the same samples make a step, with or without padding: last bits"


def _batch(found: RecipeDifference) -> Verdict:
    was, now = _global_batch(found.before), _global_batch(found.after)
    sizes = [recipe["batch"].get("size") for recipe in (found.before, found.after)]
    if was == now or (found.path != "batch.size" and None not in sizes):
        pieces = "dropout, BatchNorm and collate functions that draw see the pieces"
        return "safe", f"the same samples make a step, in other pieces: last bits; {pieces}"
    why, until = f"a step takes {now} samples instead of {was}", found.after["until"]
    if Duration.parse(until).unit in ("steps", "s"):
        return "maths", why
    return "maths", f"{why}; what is left of {until} is counted in these steps, and the schedule covers the new total"


def _global_batch(recipe: RecipeJson) -> int:
    batch = recipe["batch"]
    return batch.get("size") or solve_batch(None, batch.get("micro"), batch.get("accumulation")).size


def _ema(found: RecipeDifference) -> Verdict:
    if found.was is None:
        return "safe", "the weights train as before; their average begins with the current weights"
    return "maths", "the weights train as before, but their average is dropped or computed differently"


def _swa(found: RecipeDifference) -> Verdict:
    changed_lr = "the learning rate from model.swa.start on is another"
    before, now = (recipe["model"].get("swa") for recipe in (found.before, found.after))
    if before is None and now is not None:
        return ("safe", "the weights train as before") if now["lr"] is None else ("maths", changed_lr)
    if before is None or before["lr"] is not None or (now is not None and now["lr"] is not None):
        return "maths", f"{changed_lr}, and so is the average"
    return "maths", "the weights train as before, but their average is dropped or computed differently"


def _argument(found: RecipeDifference) -> Verdict:
    """Classify an optimizer argument: another implementation, state that the checkpoint lacks, or another update."""
    name = found.path.removeprefix("optimizer.args.").split(".")[0]
    row = optimizer_row(found.after["optimizer"]["use"])
    if name in ("fused", "foreach"):
        return "safe", _KERNELS
    if (name in row.adds_state and found.now is True) or name in row.splits_state:
        return "fatal", f"the checkpoint lacks moments that it needs: put it back, or {EXPORT}"
    return _UPDATE


def _fp8(found: RecipeDifference) -> Verdict:
    """Classify a key of ``fp8``, which has no effect in other precisions."""
    if {recipe.get("precision") for recipe in (found.before, found.after)}.isdisjoint(("fp8", "mxfp8")):
        return "safe", "it applies to precision: fp8 and mxfp8 only"
    if found.path == "fp8.emulate":
        return "safe", f"the same rounding of operands; {_KERNELS}"
    return "maths", "other layers are rounded to 8 bits, or with other scales; weights and moments are kept"


def _spikes(found: RecipeDifference) -> Verdict:
    """Classify a key of ``spikes``. warn and off never change an update; the factor then decides only the report."""
    policies = {(recipe.get("spikes") or {}).get("policy", "warn") for recipe in (found.before, found.after)}
    if policies <= {"warn", "off"}:
        return "safe", "spikes are reported or not; every update is the same"
    return "maths", "other updates are skipped when the gradient spikes"


VALIDATION: Verdict = "safe", "it is not trained on; its losses, and the best of them, do not compare with those before"
EXPORT = "export the weights and start a new run from them"
_UPDATE: Verdict = "maths", "from here on the weights are updated differently"
_ORDER = "the rest of this epoch comes in another order: some samples twice, some not at all"
_READING: Verdict = "safe", "how samples are read, not which"
_FOLDER: Verdict = "safe", "the run stays in its folder"
_OBSERVERS: Verdict = ("safe", "observers only read, and may end the run; those at the same position keep their state")
_METRICS: Verdict = ("safe", "metrics only read")
_KERNELS = "other kernels: last bits"

# A section has one rule only if all keys that it may ever get have the same class; a test requires a rule for every
# other path.
RULES: Mapping[str, Verdict | Callable[[RecipeDifference], Verdict]] = {
    "name": _FOLDER,
    "folder": _FOLDER,
    "preset": ("safe", "a recipe in a run folder states its settings, which are compared one by one"),
    "seed": ("maths", f"{_ORDER}; augmentation draws other numbers"),
    "deterministic": ("safe", _KERNELS),
    "device": ("safe", f"{_KERNELS}; dropout draws other numbers"),
    "precision": ("maths", "other arithmetic in forward and backward; weights and moments are kept"),
    "fp8": _fp8,
    "fp8.scales": _fp8,
    "fp8.layers": _fp8,
    "fp8.emulate": _fp8,
    "graphs": ("safe", f"{_KERNELS}; learning rates are rounded to float32"),
    "until": _until,
    "price": ("safe", "it does not change the training"),
    "model.use": ("maths", "another model, though the weights fit it"),
    "model.args": ("maths", "the model computes something else, though the weights fit it"),
    "model.freeze": ("maths", "other weights are trained; newly trained ones begin without moments"),
    "model.activation_checkpointing": ("safe", "activations are kept or recomputed, and are the same"),
    "model.compile": ("safe", f"{_KERNELS}; dropout draws other numbers"),
    "model.ema": _ema,
    "model.swa": _swa,
    **dict.fromkeys((f"model.swa.{key}" for key in ("start", "every", "lr", "anneal", "anneal_by")), _swa),
    "model.swa.norm_batches": ("safe", "BatchNorm statistics of the average come from other batches"),
    "model.lora": ("maths", "the adapters compute something else, though the weights fit them"),
    "model.qat": ("maths", "the forward pass rounds differently; weights and moments are kept"),
    "data.train": ("maths", "it may be other data, so the next epoch begins at once"),
    "data.val": VALIDATION,
    "data.more_val": VALIDATION,
    "data.more_val.use": VALIDATION,
    "data.more_val.args": VALIDATION,
    "data.more_val.name": VALIDATION,
    **dict.fromkeys(("data.packing.by", "data.packing.max_length"), _packing),
    "data.workers": _READING,
    "data.prefetch": _READING,
    "data.timeout": _READING,
    "data.pin_memory": _READING,
    "data.shuffle": ("maths", _ORDER),
    "data.drop_last": ("maths", "the short batch at the end of an epoch is left out, or no longer is"),
    "data.quarantine": ("maths", "other samples are left out"),
    "data.on_bad_sample": ("safe", "it matters only if a sample cannot be read"),
    "loss": ("maths", "something else is minimised"),
    "batch": _batch,
    "parallel.replicate": (
        "safe",
        "the same samples make a step, on other ranks: last bits; dropout draws other numbers",
    ),
    "parallel.shard": ("safe", "the same samples make a step, on other ranks: last bits; dropout draws other numbers"),
    "parallel.zero": ("safe", "the same sums in another order: last bits"),
    "parallel.tensor": ("safe", "the same layers, divided among other ranks: last bits; dropout draws other numbers"),
    "parallel.sequence": ("safe", "the same sums in another order: last bits; dropout draws other numbers"),
    "parallel.context": ("safe", "the same sums in another order: last bits; dropout draws other numbers"),
    "parallel.pipeline": ("safe", "the same layers on other ranks: last bits; dropout draws other numbers"),
    "parallel.schedule": ("safe", "the same sums in another order: last bits"),
    "parallel.stages": ("safe", "the same layers on other ranks: last bits; dropout draws other numbers"),
    "parallel.plan": ("safe", "the same layers, divided in another way: last bits"),
    "parallel.sync_batchnorm": ("maths", "BatchNorm has the statistics of other samples"),
    "parallel.compress": ("maths", "gradients are rounded in another way, and what PowerSGD has left out is dropped"),
    "parallel.compress_rank": ("maths", "the factors of PowerSGD have another width, and start again"),
    "parallel.compress_after": ("maths", "gradients are compressed in other steps"),
    "parallel.exact": ("safe", "the same samples make a step, summed in another order: last bits"),
    "parallel.timeout": ("safe", "it changes no result"),
    "optimizer.use": ("fatal", f"the moments of one optimizer mean nothing to another: put it back, or {EXPORT}"),
    "optimizer.args": _argument,
    "optimizer.lr": ("maths", "steps of another size; the schedule continues at its step"),
    "optimizer.weight_decay": _UPDATE,
    "optimizer.decay_norms_and_biases": _UPDATE,
    "optimizer.groups": _UPDATE,
    "optimizer.clip": _UPDATE,
    "optimizer.lr_rule": _UPDATE,
    "optimizer.offload": ("safe", "the same update elsewhere: last bits"),
    "metrics": _METRICS,
    "metrics.use": _METRICS,
    "metrics.args": _METRICS,
    "metrics.name": _METRICS,
    "observers": _OBSERVERS,
    "observers.use": _OBSERVERS,
    "observers.args": _OBSERVERS,
    "schedule": ("maths", "the learning rate follows another curve"),
    "spikes.policy": _spikes,
    "spikes.factor": _spikes,
    "evaluation": ("safe", "evaluation leaves no trace in the training"),
    "checkpoint": ("safe", "saving leaves no trace in the training"),
    "log": ("safe", "logging leaves no trace in the training"),
    "alerts": ("safe", "alerts do not affect the training"),
}
UNKNOWN: Verdict = "maths", "this version does not know it: it may matter"
