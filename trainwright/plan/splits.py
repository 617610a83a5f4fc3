"""Checks by arithmetic that a model can be divided as a layout requires, before any process group exists."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainwright.errors import Problem, RecipeError
from trainwright.plan.parallel import NEEDS_WHOLE, Degrees
from trainwright.recipe import Recipe

V_SCHEDULES = ("zbv", "dualpipev")
"""Pipeline schedules whose first and last stage are on the first rank, the second and the last but one on the next."""
TWO_STAGE_SCHEDULES = ("interleaved", "zero_bubble", *V_SCHEDULES)
"""Pipeline schedules with two stages on each rank."""


@dataclass(frozen=True)
class Cut:
    """A dimension of ``size`` equal parts that tensor parallelism divides evenly among its ranks."""

    what: str
    size: int

    def __str__(self) -> str:
        return f"{self.size} {self.what}"


@dataclass(frozen=True)
class ModelShape:
    """The properties of a model that limit its layouts.

    ``cuts`` is what tensor parallelism divides; ``cuts_sequence``: the plan of tensor parallelism says where the
    sequence is cut. ``blocks`` is the number of blocks that a pipeline divides, None if the model cannot be cut into
    stages; ``by_table``: a table of module names, not the model, defines the stages. ``tied_blocks`` names a weight
    that stages cannot share: it is in several blocks, or in a block and outside. ``tied_bytes`` is the size of the
    weights that the first and the last stage share. ``takes_parts``: the model can compute a part of a sequence.
    ``experts`` is the number of experts that ranks can divide, 0 if there are none.
    """

    name: str
    blocks: int | None = None
    by_table: bool = False
    tied_blocks: str = ""
    tied_bytes: int = 0
    takes_parts: bool = False
    experts: int = 0
    cuts: tuple[Cut, ...] = ()
    cuts_sequence: bool = False


def require_fitting(recipe: Recipe, degrees: Degrees, shape: ModelShape) -> None:
    """Raise RecipeError with every reason why a run cannot have this layout, each with a remedy."""
    axes = (_of_tensor, _of_pipeline, _of_context, _of_expert)
    if problems := [problem for of_axis in axes for problem in of_axis(recipe, degrees, shape)]:
        raise RecipeError(problems)


def _of_tensor(recipe: Recipe, degrees: Degrees, shape: ModelShape) -> Iterator[Problem]:
    tensor = degrees.tensor
    if tensor == 1:
        return
    if uneven := [cut for cut in shape.cuts if cut.size % tensor]:
        nearest = nearest_divisor([cut.size for cut in shape.cuts], tensor)
        yield Problem(
            "parallel.tensor",
            f"must divide evenly: {', '.join(map(str, uneven))}",
            got=str(tensor),
            remedy=f"write tensor: {nearest}, or give the model a multiple of {tensor} {uneven[0].what}",
        )
    if recipe.parallel.sequence and not shape.cuts_sequence:
        yield Problem(
            "parallel.sequence",
            f"needs a plan that says where the sequence is cut, and that of {shape.name} does not",
            got="true",
            remedy="leave it out: weights and heads are divided without it",
        )
    if recipe.optimizer.use in NEEDS_WHOLE:
        yield _unsupported("optimizer.use", recipe.optimizer.use, "tensor", "use adamw, adam or sgd")
    if recipe.optimizer.clip.by == "agc" and degrees.shard > 1:
        yield _unsupported(
            "optimizer.clip.by", recipe.optimizer.clip.by, "tensor and parallel.shard together", "write norm"
        )
    yield from _of_all(recipe, "tensor")


def _of_pipeline(recipe: Recipe, degrees: Degrees, shape: ModelShape) -> Iterator[Problem]:
    pipeline, schedule = degrees.pipeline, recipe.parallel.schedule
    if pipeline == 1:
        return
    has_two = schedule in TWO_STAGE_SCHEDULES
    each = 2 if has_two else 1
    if shape.blocks is None:
        rule = f"{shape.name} does not say how it is cut into stages"
        remedy = "give parallel.stages, such as {embed: first, 'layers.*': block, norm: last, head: last}, or use "
        remedy += "parallel.shard, which divides any model"
        yield Problem("parallel.pipeline", rule, got=str(pipeline), remedy=remedy)
    elif shape.blocks < pipeline * each:
        rule = f"needs a block for each of its {pipeline * each} stages, and the model has {shape.blocks}"
        remedy = f"write pipeline: {max(1, shape.blocks // each)}"
        yield Problem("parallel.pipeline", rule, got=f"{pipeline}, {schedule}", remedy=remedy)
    if shape.tied_blocks:
        rule = f"only the first and the last stage can share a weight, and one weight is {shape.tied_blocks}"
        remedy = "give each block a weight of its own, or use parallel.shard, which divides any model"
        yield Problem("parallel.pipeline", rule, got=str(pipeline), remedy=remedy)
    for is_given, obstacle in (
        (shape.by_table, f"{shape.name}: parallel.stages gives a rank one stage"),
        (recipe.model.compile, "model.compile"),
        (degrees.shard > 1, "parallel.shard"),
    ):
        if has_two and is_given:
            rule = f"has two stages on each rank, which was not shown to work with {obstacle}"
            yield Problem("parallel.schedule", rule, got=schedule, remedy="write 1f1b")
    if recipe.optimizer.groups:
        yield _unsupported(
            "optimizer.groups", "a list", "pipeline", "leave it out: a stage may have nothing that matches"
        )
    if recipe.model.freeze:
        yield _unsupported("model.freeze", "a list", "pipeline", "leave it out: a stage may have nothing left to train")
    yield from _of_all(recipe, "pipeline")


def _of_context(recipe: Recipe, degrees: Degrees, shape: ModelShape) -> Iterator[Problem]:
    context = degrees.context
    if context == 1:
        return
    if not shape.takes_parts:
        rule, remedy = f"{shape.name} cannot compute a part of a sequence", "use gpt, or parallel.tensor"
        yield Problem("parallel.context", rule, got=str(context), remedy=remedy)
    for axis in ("shard", "pipeline"):
        if getattr(degrees, axis) > 1:
            rule = f"was not shown to work with parallel.{axis}"
            yield Problem(
                "parallel.context", rule, got=str(context), remedy="use parallel.replicate or parallel.tensor"
            )
    yield from _of_all(recipe, "context")


def _of_expert(recipe: Recipe, degrees: Degrees, shape: ModelShape) -> Iterator[Problem]:
    expert = degrees.expert
    if expert == 1:
        return
    if not shape.experts:
        rule, remedy = f"{shape.name} has no experts that ranks can divide", "use moe-gpt, or parallel.shard"
        yield Problem("parallel.expert", rule, got=str(expert), remedy=remedy)
    elif shape.experts % expert:
        remedy = f"write expert: {nearest_divisor([shape.experts], expert)}"
        yield Problem("parallel.expert", f"must divide the {shape.experts} experts", got=str(expert), remedy=remedy)
    for axis in ("tensor", "pipeline", "context"):
        if getattr(degrees, axis) > 1:
            rule, remedy = f"was not shown to work with parallel.{axis}", "use parallel.replicate and parallel.shard"
            yield Problem("parallel.expert", rule, got=str(expert), remedy=remedy)
    if recipe.optimizer.use in NEEDS_WHOLE:
        yield _unsupported("optimizer.use", recipe.optimizer.use, "expert", "use adamw, adam or sgd")
    yield from _of_all(recipe, "expert")


def _of_all(recipe: Recipe, axis: str) -> Iterator[Problem]:
    """Yield a problem for each setting that does not work with ``axis``."""
    model, is_plain = recipe.model, axis in ("context", "expert")
    if model.compile and is_plain:
        yield _unsupported("model.compile", str(model.compile).lower(), axis, "leave it out")
    if model.lora is not None and (is_plain or model.lora.dora or model.lora.quantize != "none"):
        got = "dora: true" if model.lora.dora else f"quantize: {model.lora.quantize}"
        got = f"rank {model.lora.rank}" if is_plain else got
        yield _unsupported("model.lora", got, axis, "use parallel.replicate or parallel.shard")
    if model.lora is not None and axis == "tensor" and recipe.parallel.sequence:
        yield _unsupported("model.lora", f"rank {model.lora.rank}", "sequence", "leave parallel.sequence out")
    if model.activation_checkpointing not in ("none", "block"):
        yield _unsupported("model.activation_checkpointing", model.activation_checkpointing, axis, "write block")
    if recipe.spikes.policy not in ("warn", "skip", "off"):
        yield _unsupported("spikes.policy", recipe.spikes.policy, axis, "write skip")
    if recipe.optimizer.offload is True:
        yield _unsupported("optimizer.offload", "true", axis, "leave it out")
    if recipe.parallel.exact:
        yield _unsupported("parallel.exact", "true", axis, "leave parallel.exact out: this axis reorders the sums")
    if recipe.loss.chunked is True:
        yield _unsupported("loss.chunked", "true", axis, "leave it out")


def _unsupported(path: str, got: str, axis: str, remedy: str) -> Problem:
    return Problem(path, f"does not work with parallel.{axis}", got=got, remedy=remedy)


def nearest_divisor(sizes: Sequence[int], wanted: int) -> int:
    """Return the number nearest to ``wanted``, by ratio, that divides all of ``sizes``; the smaller one of two."""
    common = math.gcd(*sizes)
    divisors = [number for number in range(1, common + 1) if common % number == 0]
    return min(divisors, key=lambda number: (abs(math.log(number / wanted)), number))
