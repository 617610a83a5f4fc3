"""Degrees of parallelism, whose product is the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainwright.errors import Problem, RecipeError

if TYPE_CHECKING:  # ``tw.watch`` imports this module, and importing the recipe schema takes 0.3 s
    from trainwright.recipe import Loaded, Recipe
    from trainwright.recipe.schema import Parallel

AXES = ("pipeline", "replicate", "shard", "expert", "context", "tensor")
"""From the outside in: consecutive ranks differ in the last axis first."""


@dataclass(frozen=True)
class Degrees:
    """The number of ranks along each axis.

    Ranks along an axis have copies of the model, shards of its weights, parts of its layers, its pipeline stages, parts
    of the sequences, or some of its experts, in the order of the fields.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The degrees in the order of ``AXES``."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def ranks(self) -> int:
        return math.prod(self.shape)

    @property
    def data(self) -> int:
        """The number of parts into which the samples of a step are divided."""
        return self.replicate * self.shard * self.expert

    @property
    def divides_model(self) -> bool:
        """True if only some models can be divided like this."""
        return self.ranks > self.data or self.expert > 1

    def __str__(self) -> str:
        named = [f"{axis}: {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return f"{{{', '.join(named or ['replicate: 1'])}}}"


ONE_RANK = Degrees()


def place_of(degrees: Degrees, rank: int) -> Degrees:
    """Return the position of ``rank`` on each axis, from 0."""
    place = {}
    for axis in reversed(AXES):
        rank, place[axis] = divmod(rank, getattr(degrees, axis))
    return Degrees(**place)


def nearest(wanted: Degrees, ranks: int, count: int = 2) -> list[Degrees]:
    """Return the ``count`` layouts of ``ranks`` ranks nearest to ``wanted``, with its axes and ``replicate`` only."""
    axes = [axis for axis in AXES if axis == "replicate" or getattr(wanted, axis) > 1]
    layouts = [Degrees(**dict(zip(axes, sizes, strict=True))) for sizes in _factors(ranks, len(axes))]
    return sorted(layouts, key=lambda each: _distance(each, wanted))[:count]


def _distance(one: Degrees, other: Degrees) -> float:
    """Return the distance of two layouts in factors of two. The number of copies counts least."""
    apart = {axis: abs(math.log2(getattr(one, axis) / getattr(other, axis))) for axis in AXES}
    return sum(apart.values()) - 0.9 * apart["replicate"]


def _factors(product: int, count: int) -> Iterator[Sequence[int]]:
    """Yield all ordered ways to write ``product`` as ``count`` factors."""
    if count == 1:
        yield (product,)
        return
    for first in range(1, product + 1):
        if product % first == 0:
            for rest in _factors(product // first, count - 1):
                yield (first, *rest)


NEEDS_WHOLE = ("adafactor", "lamb", "lars")
"""Optimizers that need the full matrix to update an element, but do not gather it."""


def solve_degrees(parallel: Parallel, ranks: int) -> Degrees:
    """Fill in the axes that are ``auto``. Raises RecipeError if the product cannot be ``ranks``.

    If the plan has not resolved the ``auto`` axes, the first of them gets the ranks that the fixed axes leave, the
    others are 1. If ``replicate`` is ``auto``, too, it gets these ranks instead.
    """
    degrees = {axis: size for axis in AXES if axis != "replicate" and (size := getattr(parallel, axis)) != "auto"}
    fixed = Degrees(**degrees)
    if parallel.open_axes and parallel.replicate != "auto":
        fixed = replace(fixed, **{parallel.open_axes[0]: max(1, ranks // (fixed.ranks * parallel.replicate))})
    copies = max(1, ranks // fixed.ranks) if parallel.replicate == "auto" else parallel.replicate
    found = replace(fixed, replicate=copies)
    if found.ranks == ranks:
        return found
    processes = found.ranks
    if parallel.replicate == "auto":
        processes = fixed.ranks * max(1, round(ranks / fixed.ranks))
        found = replace(fixed, replicate=1)
    layouts = " or ".join(map(str, nearest(found, ranks)))
    raise RecipeError(
        Problem(
            "parallel",
            f"the product of the degrees must be the number of ranks, {ranks}",
            got=f"{found}, which is {found.ranks}",
            remedy=f"the nearest for {ranks} rank{'' if ranks == 1 else 's'}: {layouts}; or start {processes} "
            f"processes: end the command with -- --nproc-per-node {processes}",
        )
    )


def in_one_process(loaded: Loaded) -> Loaded:
    """Return the recipe as one process trains it, whatever its layout is."""
    parallel = loaded.recipe.parallel.model_copy(update={**dict.fromkeys(AXES, 1), "replicate": "auto"})
    return replace(loaded, recipe=loaded.recipe.model_copy(update={"parallel": parallel}))


def solve_layout(recipe: Recipe, ranks: int) -> Degrees:
    """Return the degrees of a recipe on ``ranks`` ranks. Raises RecipeError for a layout that cannot be trained."""
    degrees = solve_degrees(recipe.parallel, ranks)
    problems = list(_of_sharding(recipe)) if degrees.shard > 1 else []
    if recipe.parallel.sync_batchnorm and ranks > 1:
        problems += _of_sync_batchnorm(recipe, degrees)
    if problems:
        raise RecipeError(problems)
    return degrees


def _of_sharding(recipe: Recipe) -> Iterator[Problem]:
    nearest_to_it = f"parallel.replicate for parallel.shard ({recipe.parallel.shard})"
    if recipe.parallel.exact:
        rule = "cannot be true with parallel.shard: gradients are summed in parts, while the backward pass runs"
        yield Problem("parallel.exact", rule, got="true", remedy=f"leave it out, or write {nearest_to_it}")
    if recipe.optimizer.use in NEEDS_WHOLE:
        rule = (
            f"{recipe.optimizer.use} computes with whole matrices, and parallel.shard leaves each rank a part of them"
        )
        yield Problem("optimizer.use", rule, remedy=f"use adamw, adam or sgd, or write {nearest_to_it}")
    if recipe.optimizer.offload is True:
        rule = "cannot be true with parallel.shard: each rank has a part of the optimizer's state already"
        yield Problem("optimizer.offload", rule, got="true", remedy="leave it out, or raise parallel.shard")
    if (lora := recipe.model.lora) is not None and lora.quantize != "none":
        rule = "does not work with parallel.shard: codes of 4 bits are not divided among ranks"
        remedy = f"leave it out, or write {nearest_to_it}"
        yield Problem("model.lora.quantize", rule, got=lora.quantize, remedy=remedy)


def _of_sync_batchnorm(recipe: Recipe, degrees: Degrees) -> Iterator[Problem]:
    path, remedy = "parallel.sync_batchnorm", "leave it out, or use GroupNorm or LayerNorm"
    if recipe.parallel.exact:
        rule = "cannot be true with parallel.exact: running statistics follow the order of the slices"
        yield Problem(path, rule, got="true", remedy=remedy)
    if recipe.model.compile:
        rule = "cannot be true with model.compile: a compiled pass does not exchange them"
        yield Problem(path, rule, got="true", remedy="leave one of the two out")
    for axis in ("tensor", "pipeline", "context", "expert"):
        if getattr(degrees, axis) > 1:
            rule = f"was not shown to work with parallel.{axis}"
            yield Problem(path, rule, got="true", remedy="use parallel.replicate or parallel.shard, or GroupNorm")
