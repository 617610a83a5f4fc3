"""Selects the modules whose output gradients a run records (``log.retain_grad``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from trainwright.errors import Problem
from trainwright.recipe.schema import Recipe

MAX_MODULES = 200


def retained_modules(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules whose name matches a glob pattern, by name. Containers that are never called are excluded."""
    return {
        name: module
        for name, module in model.named_modules()
        if name and not isinstance(module, nn.ModuleList | nn.ModuleDict)
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def retain_grad_problems(model: nn.Module, recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of ``log.retain_grad``: patterns without a match, too many modules, models without hooks."""
    patterns, path = recipe.log.retain_grad, "log.retain_grad"
    names = [name for name, module in model.named_modules() if name]
    for number, pattern in enumerate(patterns):
        if retained_modules(model, [pattern]):
            continue
        rule = f"retain_grad: no module is named like {pattern!r}"
        yield Problem(f"{path}.{number}", rule, remedy=remedy_for_glob(pattern, names))
    count = len(retained_modules(model, patterns))
    if count > MAX_MODULES:
        rule = f"retain_grad matches {count:,} modules; at most {MAX_MODULES} are recorded"
        yield Problem(path, rule, remedy="use narrower patterns")
    if patterns and (recipe.model.compile or any(map(_is_compiled, model.modules()))):
        rule = "retain_grad needs hooks on modules, which a compiled model does not call"
        yield Problem(path, rule, remedy="train without torch.compile, or leave retain_grad out")
    if patterns and recipe.parallel.pipeline not in (None, 1):
        rule = "retain_grad does not work with pipeline stages, each of which has other modules"
        yield Problem(path, rule, remedy="use parallel.pipeline: 1, or leave retain_grad out")


def remedy_for_glob(pattern: str, names: Sequence[str]) -> str:
    """Return the remedy for a glob pattern that matches none of the names of a model."""
    if close := get_close_matches(pattern[:100], names, n=1, cutoff=0.3):
        return f"patterns are globs such as 'blocks.3.*'; the nearest name is {close[0]!r}"
    return f"names are, for instance: {', '.join(names[:6])}"


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None
