"""The tensor parallelism plan of a model: the style of each module, and what the plan divides.

A plan is a table from patterns of module names to styles. A built-in model has one in its module, a model of
``transformers`` includes one, and ``parallel.plan`` of a recipe defines one for any other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from trainwright.errors import UsageError, suggest
from trainwright.plan.splits import Cut, ModelShape
from trainwright.recipe.schema import TensorStyle

SplitPlan = dict[str, TensorStyle]
"""The style of each module that has one, by module name."""
TRANSFORMERS_STYLES: Mapping[str, TensorStyle] = {
    "colwise": "column",
    "colwise_rep": "column_gathered",
    "colwise_gather_output": "column_gathered",
    "rowwise": "row",
    "embedding_rowwise": "row",
    "replicated_with_grad_allreduce": "per_head",
}
_HEAD_COUNT_NAMES = ("heads", "num_attention_heads", "num_key_value_heads")
_EXAMPLE_PLAN = 'a table such as plan: {"blocks.*.up": column, "blocks.*.down": row}'


def split_plan(model: nn.Module, requested: Mapping[str, TensorStyle]) -> SplitPlan:
    """Return the plan for ``model``: the ``requested`` one, or else the model's.

    Raises:
        UsageError: There is no plan, a requested pattern matches nothing, or torch cannot split a layer.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    plan: SplitPlan = {}
    for pattern, style in (requested or _own_plan(model)).items():
        matched = names_like(pattern, model, "parallel.plan" if requested else None)
        plan |= dict.fromkeys(matched, style)
    plan = _with_adapters(plan, modules)
    for name, style in plan.items():
        _require_splittable(name, modules[name], style)
    plan |= _tied_embeddings(modules, plan)
    for places in ties_of(model):
        _require_alike(places, modules, plan)
    return plan


def _with_adapters(plan: SplitPlan, modules: Mapping[str, nn.Module]) -> SplitPlan:
    """Replace each layer with a low-rank adapter, W x + B (A x), by its base layer W and the factors A and B.

    If the outputs of W are divided, each rank has all of A, and the outputs of B that it has of W. If the inputs are
    divided, each rank has the inputs of A that it has of W, and all of B.
    """
    found: SplitPlan = {}
    for name, style in plan.items():
        parts = [each for each in modules if each.startswith(f"{name}.")]
        if f"{name}.base_layer" in parts and style in ("column", "column_gathered", "row"):
            factors: dict[str, TensorStyle] = (
                {"lora_A": "row"} if style == "row" else {"lora_A": "input", "lora_B": style}
            )
            found[f"{name}.base_layer"] = style
            found |= {each: factors[part] for each in parts if (part := each.split(".")[-2]) in factors}
        else:
            found[name] = style
    return found


def names_like(pattern: str, model: nn.Module, requested_at: str | None = None) -> list[str]:
    """Return the modules that a pattern matches, in order. Raises UsageError if a requested pattern matches none."""
    names = [name for name, _ in model.named_modules() if name]
    matched = [name for name in names if _matches(name, pattern)]
    if requested_at and not matched:
        globs = dict.fromkeys(_glob(name) for name in names)
        raise UsageError(
            f"{requested_at}: no module is named like {pattern!r}",
            remedy=f"{suggest(pattern, globs)}; * stands for one part of a name",
        )
    return matched


@dataclass(frozen=True)
class StagePlan:
    """Names of the modules on the first stage, of the blocks in order (divided among stages), and on the last stage."""

    first: tuple[str, ...]
    blocks: tuple[str, ...]
    last: tuple[str, ...]

    def elsewhere(self, blocks: Collection[int], *, is_first: bool, is_last: bool) -> list[str]:
        """Return the modules that a stage with these blocks does not have."""
        absent = [name for index, name in enumerate(self.blocks) if index not in blocks]
        return [*(() if is_first else self.first), *absent, *(() if is_last else self.last)]


def model_shape(model: nn.Module, plan: SplitPlan, table: StagePlan | None = None) -> ModelShape:
    """Return the properties of a model that limit its layout. The model may be on the meta device.

    ``table`` names the parts of a model that does not define its stages itself.
    """
    modules = dict(model.named_modules())
    sizes = {size: None for name, style in plan.items() for size in _divided(modules[name], style)}
    heads = [Cut(what, size) for what, size in _heads_of(model).items()]
    blocks, ends = getattr(model, "blocks", None), getattr(model, "stage_ends", None)
    first, last = (table.first, table.last) if table else ends or ((), ())
    tied_blocks, tied_bytes = "", 0
    for places in ties_of(model):
        owners = [owner for owner, _ in places]
        parts = {_part_of(owner, first, table.blocks if table else ("blocks.*",), last) for owner in owners}
        if parts == {"first", "last"}:
            owner, name = places[0]
            tied_bytes += getattr(model.get_submodule(owner), name).nbytes
        elif len(parts) > 1:
            tied_blocks = tied_blocks or " and ".join(".".join(filter(None, place)) for place in places[:2])
    return ModelShape(
        type(model).__name__,
        blocks=len(table.blocks) if table else len(blocks) if ends and isinstance(blocks, nn.ModuleList) else None,
        by_table=table is not None,
        tied_blocks=tied_blocks,
        tied_bytes=tied_bytes,
        takes_parts=hasattr(model, "take_part"),
        experts=math.gcd(*(weight.shape[0] for module in expert_modules(model) for weight in expert_weights(module))),
        cuts=(*heads, *sizes),
        cuts_sequence="scatter" in plan.values(),
    )


def expert_modules(model: nn.Module) -> list[Any]:
    """Return the modules whose attribute ``expert_weights`` names weights with one row for each expert."""
    return [module for module in model.modules() if hasattr(module, "expert_weights")]


def expert_weights(module: Any) -> list[nn.Parameter]:
    """Return the weights that ``expert_weights`` of a module names; an optional one may be None."""
    return [weight for name in module.expert_weights if (weight := getattr(module, name)) is not None]


def _part_of(owner: str, first: Sequence[str], blocks: Sequence[str], last: Sequence[str]) -> str:
    """Return the part that the module ``owner`` is in: ``first``, ``last``, the name of its block, or its own name."""
    for part, names in (("first", first), ("last", last), ("", blocks)):
        for name in names:
            depth = name.count(".") + 1
            start = ".".join(owner.split(".")[:depth])
            if _matches(start, name):
                return part or start
    return owner


def _own_plan(model: nn.Module) -> Mapping[str, TensorStyle]:
    if declared := getattr(model, "tensor_plan", None):
        own: Mapping[str, TensorStyle] = declared
        return own
    declared_styles: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    unknown = [f"{pattern}: {style}" for pattern, style in declared_styles.items() if style not in TRANSFORMERS_STYLES]
    if unknown:
        raise UsageError(
            f"the plan of {type(model).__name__} has styles that are not supported: {', '.join(unknown[:3])}",
            remedy=f"give parallel.plan, {_EXAMPLE_PLAN}, or use parallel.shard",
        )
    if not declared_styles:
        raise UsageError(
            f"{type(model).__name__} has no plan for tensor parallelism",
            remedy=f"give parallel.plan, {_EXAMPLE_PLAN}, or use parallel.shard, which divides any model",
        )
    return {pattern: TRANSFORMERS_STYLES[style] for pattern, style in declared_styles.items()}


def _matches(name: str, pattern: str) -> bool:
    """Match part by part, so that ``*`` does not cross a dot."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _glob(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _require_splittable(name: str, module: nn.Module, style: TensorStyle) -> None:
    divides = style in ("column", "column_gathered", "row")
    if divides and not isinstance(module, nn.Linear | nn.Embedding):
        raise UsageError(
            f"parallel.plan: {name} is a {type(module).__name__}, and {style} divides nn.Linear and nn.Embedding",
            remedy="name the linear layers inside of it, or leave it out: what is not named is computed on every rank",
        )


def _divided(module: nn.Module, style: TensorStyle) -> Iterator[Cut]:
    """Yield sizes that must be divisible by the number of ranks.

    torch can divide a full tensor unevenly, but not the activations between two layers.
    """
    if style == "column" and isinstance(module, nn.Linear):
        yield Cut("outputs of a linear layer", module.out_features)
    elif style == "column" and isinstance(module, nn.Embedding):
        yield Cut("columns of an embedding", module.embedding_dim)
    elif style == "row" and isinstance(module, nn.Linear):
        yield Cut("inputs of a linear layer", module.in_features)


def _heads_of(model: nn.Module) -> dict[str, int]:
    """Return the numbers of attention heads of a built-in transformer, or of one of ``transformers``."""
    options = getattr(model, "options", None) or getattr(model, "config", None)
    counts = {name: getattr(options, name, None) for name in _HEAD_COUNT_NAMES}
    words = {"heads": "attention heads", "num_attention_heads": "attention heads", "num_key_value_heads": "KV heads"}
    return {words[name]: count for name, count in counts.items() if isinstance(count, int)}


def _tied_embeddings(modules: Mapping[str, nn.Module], plan: SplitPlan) -> SplitPlan:
    """Return styles for embeddings that share the weight of a divided output layer: both divide its rows."""
    heads = {id(getattr(modules[name], "weight", None)) for name, style in plan.items() if style.startswith("column")}
    return {
        name: "row"
        for name, module in modules.items()
        if isinstance(module, nn.Embedding) and name not in plan and id(module.weight) in heads
    }


def ties_of(model: nn.Module) -> list[list[tuple[str, str]]]:
    """Return the places of each shared parameter: module name and parameter name."""
    places: dict[int, list[tuple[str, str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, own_name = name.rpartition(".")
        places.setdefault(id(parameter), []).append((owner, own_name))
    return [each for each in places.values() if len(each) > 1]


def _require_alike(places: list[tuple[str, str]], modules: Mapping[str, nn.Module], plan: SplitPlan) -> None:
    """Raise UsageError if a shared weight would be divided differently in two places."""
    dims = {owner: _dim(modules.get(owner), plan.get(owner)) for owner, _ in places}
    if len(set(dims.values())) > 1:
        how = ", ".join(f"{owner} ({plan.get(owner, 'not named')})" for owner in dims)
        raise UsageError(
            f"parallel.plan: one weight is used in several places, and would be divided in different ways: {how}",
            remedy="divide an embedding by row where the output layer that shares its weight is divided by column",
        )


def _dim(module: nn.Module | None, style: TensorStyle | None) -> int | None:
    """Return the dimension of the weight that a style divides."""
    by_columns = style in ("column", "column_gathered")
    if not by_columns and style != "row":
        return None
    return int(by_columns == isinstance(module, nn.Embedding))
