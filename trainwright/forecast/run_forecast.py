"""What a run of a recipe would hold and take on a device, and how it is best laid out there. Composition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from trainwright.build.assemble import Parts, at_recipe
from trainwright.engine.precision import PrecisionName
from trainwright.errors import UsageError
from trainwright.forecast.blueprint import Blueprint, blueprint
from trainwright.forecast.checkpointing_planner import CheckpointingPlanner, Speed
from trainwright.forecast.layouts import CHECKPOINTING, LayoutSurvey
from trainwright.forecast.traced_step import trace_step
from trainwright.plan.batch import solve_batch
from trainwright.plan.devices import Device
from trainwright.plan.layout import Choice, Layout, Option, choose, offloaded, weigh
from trainwright.plan.make import Note, choose_precision
from trainwright.plan.offload import offload_of, why_not_offloaded
from trainwright.plan.remedies import Held, Remedy, remedies
from trainwright.plan.trace import Trace
from trainwright.recipe import Loaded, Recipe
from trainwright.recipe.byte_size import parse_bytes


@dataclass(frozen=True)
class Forecast:
    """``written`` is the recipe as it stands; ``choice`` the best layout of the same training.

    ``trace`` is of ``written`` where it fits, else of the choice. ``settings`` lead from the recipe to the choice.
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
        """What ``trace`` is of."""
        return self.written if self.written.fits else self.choice.best


def forecast(loaded: Loaded, device: Device, *, parts: Parts | None = None) -> Forecast:
    """Traces the ways to run a recipe, without the device and without the memory.

    Raises RecipeError for what cannot be built, UsageError for a model whose step cannot be traced.
    """
    recipe, plan = loaded.recipe, blueprint(loaded, parts)
    may_offload = can_offload(loaded, device)
    batch = solve_batch(recipe.batch.size, recipe.batch.micro, recipe.batch.accumulation)
    survey = LayoutSurvey(plan, device, precision_on(recipe, device))
    asked = recipe.model.activation_checkpointing
    ways = survey.ways(CHECKPOINTING)
    moved = offloaded(ways, device) if may_offload else []
    budget = device if asked in (*CHECKPOINTING, "auto") else within(device, parse_bytes(asked))
    choice = choose(among(recipe, ways, moved, when_unasked=True), budget, batch.size)
    here = among(recipe, ways, moved, when_unasked=False)
    name = asked if any(way.checkpointing == asked for way in here) else choice.best.way.checkpointing
    each = [weigh(way, device, batch.size, batch.micro) for way in here if way.checkpointing == name]
    written = next((option for option in each if option.fits), each[0])
    if recipe.batch.micro == "auto":
        written = choice.best
    shown = written if written.fits else choice.best
    parameters, trainable = plan.counts
    return Forecast(
        name=recipe.name,
        device=device,
        size=batch.size,
        parameters=parameters,
        trainable=trainable,
        written=written,
        choice=choice,
        trace=shown.way.scaled.at(shown.micro, shown.accumulation),
        remedies=() if choice.fits else remedies(_held(plan, choice.best, device), device),
        settings=settings(recipe, choice.best) if choice.fits else (),
        notes=(*choice.notes, *_beside(recipe, choice.best)),
    )


def can_offload(loaded: Loaded, device: Device) -> bool:
    """Whether the optimizer may go to the host's memory. Raises RecipeError where it may not and is asked to."""
    ask = loaded.recipe.optimizer
    why = why_not_offloaded(ask.use, ask.args)
    if why and ask.offload is True:
        with at_recipe(loaded, "optimizer.offload"):
            raise UsageError(f"{ask.use} cannot be offloaded: {why}", remedy="set it to false, or choose adamw")
    return not why and device.kind != "cpu"


def among(recipe: Recipe, ways: Sequence[Layout], moved: Sequence[Layout], *, when_unasked: bool) -> list[Layout]:
    """Those that a recipe allows; ``moved`` are the same with the optimizer offloaded."""
    asked = recipe.optimizer.offload
    if asked is True and moved:
        return list(moved)
    return [*ways, *(moved if when_unasked or asked == "auto" else ())]


def precision_on(recipe: Recipe, device: Device) -> PrecisionName:
    """What the recipe computes in there; on a CPU ``auto`` is fp32, as the rehearsal of a run may decide otherwise."""
    if device.kind == "cpu":
        return "fp32" if recipe.precision in ("auto", "tf32") else cast(PrecisionName, recipe.precision)
    return choose_precision(recipe.precision, device.kind, device.precisions, {})[0]


def settings(recipe: Recipe, best: Option) -> tuple[str, ...]:
    """What to change in the recipe to run as ``best``."""
    found = []
    batch = solve_batch(recipe.batch.size, recipe.batch.micro, recipe.batch.accumulation)
    if recipe.batch.micro == "auto" or best.micro != batch.micro:
        found += [f"batch.size={batch.size}", f"batch.micro={best.micro}"]
        found += ["batch.accumulation=null"] if recipe.batch.accumulation is not None else []
    if best.way.checkpointing != recipe.model.activation_checkpointing:
        found.append(f"model.activation_checkpointing={best.way.checkpointing}")
    if best.way.offload and recipe.optimizer.offload is False:
        found.append("optimizer.offload=true")
    return tuple(found)


@dataclass(frozen=True)
class Point:
    """Peak bytes and seconds of a step with some of it computed again; ``what`` in words."""

    peak_bytes: int
    step_s: float
    what: str


def frontier(made: Forecast, loaded: Loaded, *, points: int = 5, parts: Parts | None = None) -> list[Point]:
    """Memory against time in the micro-batch that ``made`` shows: the planner's choices between all and nothing."""
    from trainwright.plan.checkpointing import describe

    option, plan = made.shown, blueprint(loaded, parts)
    planner = planner_for(plan, made.device, option)
    base = weigh(replace(option.way, scaled=option.way.scaled), made.device, made.size, option.micro)
    without = base.step_s - base.time.by_phase.get("recompute", 0.0)
    return [
        Point(each.peak_bytes, without + each.extra_s * option.accumulation, describe(each.recompute))
        for each in planner.frontier(points)
    ]


def planner_for(plan: Blueprint, device: Device, option: Option) -> CheckpointingPlanner:
    """The planner of what to compute again, for the micro-batch of an option."""
    precision = cast(PrecisionName, option.way.precision)
    rate = device.flops.get(precision, device.flops["fp32"]) * device.reach_flops
    return CheckpointingPlanner(
        partial(plan.subject, samples=option.micro, chunked=option.way.chunked),
        partial(
            trace_step,
            device=device.kind,
            precision=precision,
            accumulation=min(option.accumulation, 2),
            clip=plan.loaded.recipe.optimizer.clip.by != "none",
        ),
        Speed(rate, device.bandwidth * device.reach_bandwidth, overlaps=device.kind == "cuda"),
    )


def within(device: Device, budget_bytes: int) -> Device:
    """The device as if a step could take so much of it."""
    share = device.usable_bytes / device.memory_bytes
    return device.with_memory(min(device.memory_bytes, int(budget_bytes / share)))


def _held(plan: Blueprint, option: Option, device: Device) -> Held:
    trace = option.way.scaled.at(option.micro, option.accumulation)
    parameters, trainable = plan.counts
    recipe = plan.loaded.recipe
    return Held(
        peak_bytes=option.peak_bytes,
        kinds=trace.peak.held,
        optimizer=recipe.optimizer.use,
        parameters=parameters,
        trainable=trainable,
        has_lora=recipe.model.lora is not None,
        cast_bytes=2 * trainable if option.way.precision in ("bf16", "fp16") else 0,
        offload=offload_of(option.way.scaled.small, device) if can_offload(plan.loaded, device) else None,
    )


def _beside(recipe: Recipe, best: Option) -> list[Note]:
    """What else takes memory and is no tensor of the step."""
    from trainwright.plan.explain import human_bytes

    found = []
    held = best.way.scaled.small.resident
    moved = best.way.offload.state_bytes if best.way.offload else 0
    state = held.get("weights", 0) + held.get("optimizer", 0) + moved
    if recipe.checkpoint.asynchronous:
        why = f"checkpoint.asynchronous keeps {human_bytes(state)} in the host's memory while a checkpoint is written"
        found.append(Note("host memory", human_bytes(state), why))
    if recipe.model.compile:
        why = "the trace is of the model as it stands; what the compiler fuses takes less, its autotuning more"
        found.append(Note("compile", "not seen", why))
    return found
