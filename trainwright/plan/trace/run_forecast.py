"""The forecast of a recipe on a device: memory, step time, the best layout, and remedies if it does not fit.

The peaks of remedies are arithmetic on the trace of the layout with the lowest peak; they are not traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Literal, cast

from trainwright.assembly.assemble import Parts, at_recipe
from trainwright.engine.precision import PrecisionName
from trainwright.errors import UsageError
from trainwright.plan.amounts import human_bytes, human_seconds
from trainwright.plan.batch import solve_batch
from trainwright.plan.call_trace import Kind, Trace
from trainwright.plan.devices import Device
from trainwright.plan.layout import (
    Choice,
    Layout,
    Offload,
    Option,
    choose,
    micro_sizes,
    offload_layouts,
    offload_of,
    weigh,
    why_not_offloaded,
)
from trainwright.plan.make import Note, choose_precision, require_fp8
from trainwright.plan.trace.blueprint import Blueprint, make_blueprint
from trainwright.plan.trace.checkpointing_planner import CheckpointingPlanner, Speed
from trainwright.plan.trace.layouts import POLICIES, LayoutSurvey
from trainwright.plan.trace.traced_step import trace_step
from trainwright.recipe import Loaded, Recipe
from trainwright.recipe.formatting import parse_bytes

Means = Literal["here", "devices"]
"""``here``: remedies on this device. ``devices``: remedies with several devices."""


@dataclass(frozen=True)
class Remedy:
    """One change. ``settings`` are its ``--set`` arguments, () if this version has none."""

    name: str
    means: Means
    settings: tuple[str, ...]
    peak_bytes: int
    fits: bool
    why: str

    def line(self) -> str:
        """One line of text."""
        verdict = "fits" if self.fits else "does not fit"
        return f"{self.name}: about {human_bytes(self.peak_bytes)}, {verdict}; {self.why}"


@dataclass(frozen=True)
class PeakMemory:
    """Peak memory and parameters of the layout with the lowest peak. The optimizer is on the device.

    ``offload`` is what offload would move, None if it is impossible. ``cast_bytes`` are the 16-bit copies that autocast
    keeps of trained weights; it keeps none of frozen ones.
    """

    peak_bytes: int
    kinds: Mapping[Kind, int]
    optimizer: str
    parameters: int
    trainable: int
    has_lora: bool = False
    cast_bytes: int = 0
    offload: Offload | None = None

    @property
    def kept_casts(self) -> int:
        """Bytes of autocast copies in the peak."""
        return min(self.cast_bytes, self.kinds.get("temporaries", 0))

    def without(self, *kinds: Kind) -> int:
        """Return the peak without memory of these kinds."""
        return self.peak_bytes - sum(self.kinds.get(kind, 0) for kind in kinds)


def remedies(held: PeakMemory, device: Device) -> tuple[Remedy, ...]:
    """Return all changes that save memory: first those that fit, and remedies on this device before more devices."""
    return tuple(sorted(_remedies(held, device), key=lambda remedy: (not remedy.fits, remedy.means == "devices")))


def _remedies(held: PeakMemory, device: Device) -> Iterator[Remedy]:
    def remedy(name: str, settings: tuple[str, ...], peak_bytes: int, why: str, means: Means = "here") -> Remedy:
        return Remedy(name, means, settings, peak_bytes, peak_bytes <= device.usable_bytes, why)

    weights, grads, state = (held.kinds.get(kind, 0) for kind in ("weights", "gradients", "optimizer"))
    if state and held.optimizer not in ("adafactor", "sgd"):
        left = max(held.without("optimizer"), weights + 2 * grads)  # a guarded update copies the gradients
        why = "its second moment is factored, so it keeps next to nothing; another optimizer: tune its lr again"
        yield remedy("Adafactor", ("optimizer.use=adafactor", "optimizer.args={}"), left, why)
    if not held.has_lora and held.trainable >= held.parameters // 2:
        left = held.without("optimizer", "gradients") - held.kept_casts
        why = "adapters are trained, the fp32 weights stay unchanged: for a pretrained model, not for a new one"
        yield remedy("LoRA", ("model.lora={rank: 8}",), left, why)
    if state and held.optimizer in ("adam", "adamw"):
        why = "AdamW with blockwise 8-bit moments (arXiv:2110.02861), by torchao"
        yield remedy("8-bit moments", ("optimizer.use=adamw8bit",), held.peak_bytes - state * 3 // 4, why)
    if (moved := held.offload) is not None:
        host, more = human_bytes(moved.host_bytes), human_seconds(moved.step_s)
        why = f"moments and update in the host's memory, of which it takes {host}; a step takes {more} more"
        left = held.peak_bytes - moved.state_bytes
        offload = remedy("optimizer offload", ("optimizer.offload=true",), left, why)
        if moved.lacks_room(device):
            why = f"{why}; {human_bytes(device.host_memory_bytes)} are free there"
            offload = replace(offload, fits=False, why=why)
        yield offload
    shared = weights + grads + state
    rest = held.peak_bytes - shared  # includes autocast's copies of the weights, which are not sharded
    room = device.usable_bytes - rest
    if device.kind != "cpu" and room > 0 and shared:
        count = max(2, ceil(shared / room))
        why = "each holds its shard of weights, gradients and moments; the plan with --ranks says more"
        settings = (f"parallel.shard={count}",)
        yield remedy(f"sharding over {count} such devices", settings, rest + shared // count, why, "devices")


@dataclass(frozen=True)
class Forecast:
    """``written`` is the recipe as written; ``choice`` is the best layout of the same training.

    ``trace`` is the trace of ``shown``. ``settings`` are the ``--set`` arguments that turn the recipe into the choice.
    """

    name: str
    device: Device
    size: int
    parameters: int
    trainable: int
    written: Option
    choice: Choice
    trace: Trace
    remedies: tuple[Remedy, ...]
    settings: tuple[str, ...]
    notes: tuple[Note, ...]

    @property
    def shown(self) -> Option:
        """``written`` if it fits, else the best of ``choice``."""
        return self.written if self.written.fits else self.choice.best


def forecast(loaded: Loaded, device: Device, *, parts: Parts | None = None) -> Forecast:
    """Trace the layouts that a recipe allows, without the device and without its memory.

    Raises RecipeError for what cannot be built, UsageError for a model whose step cannot be traced.
    """
    recipe, blueprint = loaded.recipe, make_blueprint(loaded, parts)
    batch = solve_batch(recipe.batch.size, recipe.batch.micro, recipe.batch.accumulation)
    survey = LayoutSurvey(blueprint, device, precision_on(recipe, device))
    setting = recipe.model.activation_checkpointing
    layouts = survey.layouts(POLICIES, [*micro_sizes(batch.size), batch.micro])
    movable = device if can_offload(loaded, device) else None
    budget = device if setting in (*POLICIES, "auto") else with_budget(device, parse_bytes(setting))
    choice = choose(with_offload(recipe, layouts, movable, by_default=True), budget, batch.size)
    if not choice.fits and not choice.best.layout.chunked and may_chunk(blueprint):
        in_chunks = survey.layouts_of(POLICIES, chunked=True)
        choice = choose(with_offload(recipe, in_chunks, movable, by_default=True), budget, batch.size)
    allowed = with_offload(recipe, layouts, movable, by_default=False)
    fixed = [layout for layout in allowed if layout.is_of(batch.micro)]
    policies = [layout.checkpointing for layout in fixed]
    policy = next((each for each in (setting, choice.best.layout.checkpointing) if each in policies), policies[-1])
    of_policy = [layout for layout in fixed if layout.checkpointing == policy]
    options = [weigh(layout, device, batch.size, batch.micro) for layout in of_policy]
    written = next((option for option in options if option.fits), options[0])
    if recipe.batch.micro == "auto":
        written = choice.best
    shown = written if written.fits else choice.best
    parameters, trainable = blueprint.counts
    return Forecast(
        name=recipe.name,
        device=device,
        size=batch.size,
        parameters=parameters,
        trainable=trainable,
        written=written,
        choice=choice,
        trace=shown.layout.scaled.at(shown.micro, shown.accumulation),
        remedies=() if choice.fits else remedies(_peak_memory(blueprint, choice.best, device), device),
        settings=settings(recipe, choice.best, chunked=blueprint.chunked(choice.best.micro, device))
        if choice.fits
        else (),
        notes=(*choice.notes, *_other_memory(recipe, choice.best)),
    )


def as_written(loaded: Loaded, device: Device, *, parts: Parts | None = None) -> Option | None:
    """Return the recipe's own layout from two traces, or None if the recipe leaves anything to the plan.

    Raises as ``forecast``.
    """
    recipe = loaded.recipe
    policy = recipe.model.activation_checkpointing
    if policy not in POLICIES or recipe.batch.micro == "auto" or recipe.optimizer.offload:
        return None
    survey = LayoutSurvey(make_blueprint(loaded, parts), device, precision_on(recipe, device))
    batch = solve_batch(recipe.batch.size, recipe.batch.micro, recipe.batch.accumulation)
    (layout,) = survey.layouts([policy], [batch.micro])
    return weigh(layout, device, batch.size, batch.micro)


def can_offload(loaded: Loaded, device: Device) -> bool:
    """Return True if the optimizer may be offloaded. Raises RecipeError if it may not and the recipe requires it."""
    section = loaded.recipe.optimizer
    why = why_not_offloaded(section.use, section.args)
    if why and section.offload is True:
        with at_recipe(loaded.source, "optimizer.offload"):
            raise UsageError(f"{section.use} cannot be offloaded: {why}", remedy="set it to false, or choose adamw")
    return not why and device.kind != "cpu"


def with_offload(recipe: Recipe, layouts: Sequence[Layout], device: Device | None, *, by_default: bool) -> list[Layout]:
    """Return the layouts that ``optimizer.offload`` of the recipe allows on a device; None: no offload is possible.

    ``by_default``: offload is also allowed if the recipe does not mention it.
    """
    moved = [] if device is None else offload_layouts(layouts, device)
    setting = recipe.optimizer.offload
    if setting is True and moved:
        return list(moved)
    return [*layouts, *(moved if by_default or setting == "auto" else ())]


def precision_on(recipe: Recipe, device: Device) -> PrecisionName:
    """Return the recipe's precision on the device. On a CPU ``auto`` is fp32 here; the dry run may choose another."""
    require_fp8(recipe, device.name, device.precisions)
    if device.kind == "cpu":
        return "fp32" if recipe.precision in (None, "auto", "tf32") else cast(PrecisionName, recipe.precision)
    return choose_precision(recipe.precision, device.kind, device.precisions, {})[0]


def may_chunk(blueprint: Blueprint) -> bool:
    """Return True if the recipe lets the plan compute the loss in chunks, and model and loss support it."""
    return blueprint.loaded.recipe.loss.chunked == "auto" and blueprint.classes is not None


def settings(recipe: Recipe, best: Option, *, chunked: bool) -> tuple[str, ...]:
    """Return the recipe changes needed to run as ``best``. ``chunked``: a run without changes chunks the loss."""
    found = []
    batch = solve_batch(recipe.batch.size, recipe.batch.micro, recipe.batch.accumulation)
    if recipe.batch.micro == "auto" or best.micro != batch.micro:
        found += [f"batch.size={batch.size}", f"batch.micro={best.micro}"]
        found += ["batch.accumulation=null"] if recipe.batch.accumulation is not None else []
    if best.layout.checkpointing != recipe.model.activation_checkpointing:
        found.append(f"model.activation_checkpointing={best.layout.checkpointing}")
    if recipe.batch.micro != "auto" and best.layout.chunked != chunked:
        found.append(f"loss.chunked={'true' if best.layout.chunked else 'false'}")
    if best.layout.offload and recipe.optimizer.offload is False:
        found.append("optimizer.offload=true")
    return tuple(found)


def planner_for(blueprint: Blueprint, device: Device, option: Option) -> CheckpointingPlanner:
    """Return the planner of activation checkpointing for the micro-batch of an option."""
    precision = cast(PrecisionName, option.layout.precision)
    rate = device.flops.get(precision, device.flops["fp32"]) * device.reach_flops
    return CheckpointingPlanner(
        partial(blueprint.traced_objects, samples=option.micro, chunked=option.layout.chunked),
        partial(
            trace_step,
            device=device.kind,
            precision=precision,
            accumulation=min(option.accumulation, 2),
            clip=blueprint.loaded.recipe.optimizer.clip.by != "none",
        ),
        Speed(rate, device.bandwidth * device.reach_bandwidth, overlaps=device.kind == "cuda"),
    )


def with_budget(device: Device, budget_bytes: int) -> Device:
    """Return the device with so little memory that a step can use ``budget_bytes`` of it."""
    usable_fraction = device.usable_bytes / device.memory_bytes
    return device.with_memory(min(device.memory_bytes, int(budget_bytes / usable_fraction)))


def _peak_memory(blueprint: Blueprint, option: Option, device: Device) -> PeakMemory:
    trace = option.layout.scaled.at(option.micro, option.accumulation)
    parameters, trainable = blueprint.counts
    recipe = blueprint.loaded.recipe
    return PeakMemory(
        peak_bytes=option.peak_bytes,
        kinds=trace.peak.held,
        optimizer=recipe.optimizer.use,
        parameters=parameters,
        trainable=trainable,
        has_lora=recipe.model.lora is not None,
        cast_bytes=2 * trainable if option.layout.precision in ("bf16", "fp16", "fp8", "mxfp8") else 0,
        offload=offload_of(option.layout.scaled.small, device) if can_offload(blueprint.loaded, device) else None,
    )


def _other_memory(recipe: Recipe, best: Option) -> list[Note]:
    """Return notes on memory in addition to the tensors of the step."""
    found = []
    held = best.layout.scaled.small.resident
    moved = best.layout.offload.state_bytes if best.layout.offload else 0
    state = held.get("weights", 0) + held.get("optimizer", 0) + moved
    if recipe.checkpoint.asynchronous:
        why = f"checkpoint.asynchronous keeps {human_bytes(state)} in the host's memory while a checkpoint is written"
        found.append(Note("host memory", human_bytes(state), why))
    if recipe.model.compile:
        why = "the trace is of the uncompiled model; fused operators take less memory, autotuning takes more"
        found.append(Note("compile", "not traced", why))
    return found
