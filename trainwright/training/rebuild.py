"""Builds the arguments of ``tw.fit`` by a named function, so that another process can build them again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch import nn

from trainwright.checkpoint.rng import preserved_rng, seed_all
from trainwright.errors import UsageError
from trainwright.recipe import Source
from trainwright.recipe.resolve import find

if TYPE_CHECKING:
    from trainwright.training.fit import FitOptions

ORDER = ("model", "data", "loss", "optimizer")
WHERE = Source("module:function")
OBJECTS = ("data", "loss", "advance", "val", "optimizer", "schedule", "metrics", "observers")
"""Arguments of ``tw.fit`` that may be objects, which no file describes."""
LET_A_FUNCTION = "let a function in a module return them: tw.fit('module:function')"


class Rebuild(NamedTuple):
    """A record of how to build the objects of a run again.

    Attributes:
        function: The function as ``module:function``; None if there is none.
        reason: The reason why there is none, else "".
        is_seeded: True if the run seeds the random generators, including before it calls the function.
    """

    function: str | None
    reason: str
    is_seeded: bool = False


NO_FUNCTION = Rebuild(None, "model, data and loss were passed as objects, and no file says how they are made")


class FitArguments(NamedTuple):
    """The arguments of ``tw.fit`` that a function returned, merged with those of the call."""

    model: nn.Module
    data: object
    loss: str | Callable[..., object] | None
    options: FitOptions
    rebuild: Rebuild


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed the generators within the block and restore them afterwards; do nothing for None."""
    if seed is None:
        yield
        return
    with preserved_rng():
        seed_all(seed)
        yield


def call_function(function: object, given: Mapping[str, Any]) -> FitArguments:
    """Call ``function``, or the function of that name. ``given``, the arguments of the call, override what it returns.

    Raises UsageError if there is no such function, or if it returns no arguments of ``tw.fit``.
    """
    given = {name: each for name, each in given.items() if each is not None and each is not False}
    given = {name: each for name, each in given.items() if not (isinstance(each, tuple) and not each)}
    arguments = {**call_for_arguments(function), **given}
    if "data" not in arguments:
        raise UsageError("fit: data are missing", remedy="let the function return (model, data, loss)")
    model, data, loss = (arguments.pop(name, None) for name in ("model", "data", "loss"))
    return FitArguments(model, data, loss, cast("FitOptions", arguments), _rebuild(function, given))


def call_for_arguments(function: object) -> dict[str, Any]:
    """Return the arguments of ``tw.fit`` that a function returns. ``function`` may be a name, ``module:function``.

    It must return ``(model, data, loss, optimizer)``, a shorter tuple of these, or a dict. Raises UsageError otherwise.
    """
    if isinstance(function, str) and ":" in function:
        function = find(function, {}, "function", WHERE)
    if not callable(function) or isinstance(function, type | nn.Module):
        what = repr(function) if isinstance(function, str | type) else f"a {type(function).__name__}"
        raise UsageError(
            f"fit: the model is {what}",
            remedy="pass an nn.Module, or a function that returns (model, data, loss), or its name 'module:function'",
        )
    name = getattr(function, "__name__", type(function).__name__)
    made = function()
    if isinstance(made, tuple) and 1 < len(made) <= len(ORDER):
        made = dict(zip(ORDER, made, strict=False))
    if not isinstance(made, Mapping) or not isinstance(made.get("model"), nn.Module):
        kind = "a dict without a model" if isinstance(made, Mapping) else f"a {type(made).__name__}"
        raise UsageError(
            f"{name} returned {kind}",
            remedy="return (model, data, loss, optimizer), or fewer of them, or a dict of arguments of tw.fit",
        )
    return dict(made)


def _rebuild(function: object, given: Mapping[str, object]) -> Rebuild:
    besides = [name for name in OBJECTS if name in given and _is_object(given[name])]
    if besides:
        return Rebuild(None, f"{' and '.join(besides)} did not come from its function, and no file says how it is made")
    if isinstance(function, str):
        return Rebuild(function, "")
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module == "__main__":
        return Rebuild(None, f"{name} is defined in the script itself, which trains when it is imported")
    found: object = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not function:
        return Rebuild(None, f"{name or type(function).__name__} cannot be imported by its name")
    return Rebuild(f"{module}:{name}", "")


def _is_object(value: object) -> bool:
    """Return True if an argument contains objects other than names and numbers, which the recipe has."""
    if isinstance(value, Mapping):
        return any(map(_is_object, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_object, value))
    return not isinstance(value, str | int | float)
