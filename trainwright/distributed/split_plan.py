"""The plan of tensor parallelism for a model: which style each of its modules has, and what the plan divides.

A plan is a table from patterns of module names to styles. A model in the box has one beside it, a model of
``transformers`` brings its own, and ``parallel.plan`` of a recipe gives one for any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from fnmatch import fnmatchcase

from torch import nn

from trainwright.errors import UsageError, suggest
from trainwright.plan.splits import Cut, ModelShape
from trainwright.recipe.parallel import TensorStyle

SplitPlan = dict[str, TensorStyle]
"""The style of each module that has one, by its name."""
OF_TRANSFORMERS: Mapping[str, TensorStyle] = {
    "colwise": "column",
    "colwise_rep": "column_gathered",
    "colwise_gather_output": "column_gathered",
    "rowwise": "row",
    "embedding_rowwise": "row",
    "replicated_with_grad_allreduce": "per_head",
}
_HEADS = ("heads", "num_attention_heads", "num_key_value_heads")
_PLAN_IT = 'a table such as plan: {"blocks.*.up": column, "blocks.*.down": row}'


def split_plan(model: nn.Module, asked: Mapping[str, TensorStyle]) -> SplitPlan:
    """The plan for ``model``: what is ``asked`` for, or else its own.

    Raises UsageError where there is none, where a pattern that was asked for matches nothing, and for a layer that
    torch cannot split.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    plan: SplitPlan = {}
    for pattern, style in (asked or _own_plan(model)).items():
        matched = names_like(pattern, model, "parallel.plan" if asked else None)
        plan |= dict.fromkeys(matched, style)
    for name, style in plan.items():
        _require_splittable(name, modules[name], style)
    plan |= _tied_embeddings(modules, plan)
    for places in ties_of(model):
        _require_alike(places, modules, plan)
    return plan


def names_like(pattern: str, model: nn.Module, asked_at: str | None = None) -> list[str]:
    """The modules that a pattern matches, in their order. Raises UsageError where none does, and it was asked for."""
    names = [name for name, _ in model.named_modules() if name]
    matched = [name for name in names if _matches(name, pattern)]
    if asked_at and not matched:
        globs = dict.fromkeys(_glob(name) for name in names)
        raise UsageError(
            f"{asked_at}: no module is named like {pattern!r}",
            remedy=f"{suggest(pattern, globs)}; * stands for one part of a name",
        )
    return matched


def model_shape(model: nn.Module, plan: SplitPlan, table: Sized | None = None) -> ModelShape:
    """What of a model limits how it can be laid out. The model may be on the meta device.

    ``table`` are the blocks that a table of stages names, where the model itself does not say how it is cut.
    """
    modules = dict(model.named_modules())
    sizes = {size: None for name, style in plan.items() for size in _divided(modules[name], style)}
    heads = [Cut(what, size) for what, size in _heads_of(model).items()]
    blocks, ends = getattr(model, "blocks", None), getattr(model, "stage_ends", None)
    return ModelShape(
        type(model).__name__,
        blocks=len(table) if table else len(blocks) if ends and isinstance(blocks, nn.ModuleList) else None,
        by_table=table is not None,
        is_tied=bool(ties_of(model)),
        takes_parts=hasattr(model, "take_part"),
        cuts=(*heads, *sizes),
        cuts_sequence="scatter" in plan.values(),
    )


def _own_plan(model: nn.Module) -> Mapping[str, TensorStyle]:
    """That of the class, or of ``transformers``."""
    if declared := getattr(model, "tensor_plan", None):
        own: Mapping[str, TensorStyle] = declared
        return own
    theirs: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    unknown = [f"{pattern}: {style}" for pattern, style in theirs.items() if style not in OF_TRANSFORMERS]
    if unknown:
        raise UsageError(
            f"the plan of {type(model).__name__} has styles that are not supported: {', '.join(unknown[:3])}",
            remedy=f"give parallel.plan, {_PLAN_IT}, or use parallel.shard",
        )
    if not theirs:
        raise UsageError(
            f"{type(model).__name__} has no plan for tensor parallelism",
            remedy=f"give parallel.plan, {_PLAN_IT}, or use parallel.shard, which divides any model",
        )
    return {pattern: OF_TRANSFORMERS[style] for pattern, style in theirs.items()}


def _matches(name: str, pattern: str) -> bool:
    """Part by part, so that ``*`` does not cross a dot."""
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
    """What must be divisible: torch divides unevenly, too, where it sees the whole, but not between two layers."""
    if style == "column" and isinstance(module, nn.Linear):
        yield Cut("outputs of a linear layer", module.out_features)
    elif style == "column" and isinstance(module, nn.Embedding):
        yield Cut("columns of an embedding", module.embedding_dim)
    elif style == "row" and isinstance(module, nn.Linear):
        yield Cut("inputs of a linear layer", module.in_features)


def _heads_of(model: nn.Module) -> dict[str, int]:
    """The numbers of attention heads, of the in-box transformer and those of ``transformers``."""
    options = getattr(model, "options", None) or getattr(model, "config", None)
    counts = {name: getattr(options, name, None) for name in _HEADS}
    words = {"heads": "attention heads", "num_attention_heads": "attention heads", "num_key_value_heads": "KV heads"}
    return {words[name]: count for name, count in counts.items() if isinstance(count, int)}


def _tied_embeddings(modules: Mapping[str, nn.Module], plan: SplitPlan) -> SplitPlan:
    """An embedding whose weight is that of an output layer in the plan is divided as that is: by rows."""
    heads = {id(getattr(modules[name], "weight", None)) for name, style in plan.items() if style.startswith("column")}
    return {
        name: "row"
        for name, module in modules.items()
        if isinstance(module, nn.Embedding) and name not in plan and id(module.weight) in heads
    }


def ties_of(model: nn.Module) -> list[list[tuple[str, str]]]:
    """The places of each parameter that has several: names of modules, and of the parameter there."""
    places: dict[int, list[tuple[str, str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, own_name = name.rpartition(".")
        places.setdefault(id(parameter), []).append((owner, own_name))
    return [each for each in places.values() if len(each) > 1]


def _require_alike(places: list[tuple[str, str]], modules: Mapping[str, nn.Module], plan: SplitPlan) -> None:
    """Raises UsageError where a weight would be divided in one place otherwise than in another."""
    dims = {owner: _dim(modules.get(owner), plan.get(owner)) for owner, _ in places}
    if len(set(dims.values())) > 1:
        how = ", ".join(f"{owner} ({plan.get(owner, 'not named')})" for owner in dims)
        raise UsageError(
            f"parallel.plan: one weight is used in several places, and would be divided in different ways: {how}",
            remedy="divide an embedding by row where the output layer that shares its weight is divided by column",
        )


def _dim(module: nn.Module | None, style: TensorStyle | None) -> int | None:
    """The dimension of the weight that a style divides."""
    by_columns = style in ("column", "column_gathered")
    if not by_columns and style != "row":
        return None
    return int(by_columns == isinstance(module, nn.Embedding))
