"""A function that returns what ``tw.fit`` takes: another process makes the objects again by its name."""

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
    """How the objects of a run are made again: by ``function``, a ``module:function``; else ``reason`` says why not.

    ``is_seeded``: the run seeds the random generators, also before it calls the function.
    """

    function: str | None
    reason: str
    is_seeded: bool = False


PASSED = Rebuild(None, "model, data and loss were passed as objects, and no file says how they are made")


class FitArguments(NamedTuple):
    """The arguments of ``tw.fit`` that a function returned, and those of the call."""

    model: nn.Module
    data: object
    loss: str | Callable[..., object] | None
    options: FitOptions
    rebuild: Rebuild


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Inside, the generators are seeded; None leaves them alone."""
    if seed is None:
        yield
        return
    with preserved_rng():
        seed_all(seed)
        yield


def made_by(function: object, given: Mapping[str, Any]) -> FitArguments:
    """Calls ``function``, or the one of that name. ``given``, the arguments of the call, replace what it returns.

    Raises UsageError for anything that is no such function.
    """
    given = {name: each for name, each in given.items() if each is not None and each is not False}
    given = {name: each for name, each in given.items() if not (isinstance(each, tuple) and not each)}
    arguments = {**returned_by(function), **given}
    if "data" not in arguments:
        raise UsageError("fit: there is no data", remedy="let the function return (model, data, loss)")
    model, data, loss = (arguments.pop(name, None) for name in ("model", "data", "loss"))
    return FitArguments(model, data, loss, cast("FitOptions", arguments), _rebuild(function, given))


def returned_by(function: object) -> dict[str, Any]:
    """The arguments of ``tw.fit`` by name that a function returns, itself or by its name ``module:function``.

    It returns ``(model, data, loss, optimizer)``, fewer of them, or a dict. Raises UsageError for anything else.
    """
    if isinstance(function, str) and ":" in function:
        function = find(function, {}, "function", WHERE)
    if not callable(function) or isinstance(function, type | nn.Module):
        what = repr(function) if isinstance(function, str | type) else f"a {type(function).__name__}"
        raise UsageError(
            f"fit: the model is {what}",
            remedy="give an nn.Module, or a function that returns (model, data, loss), also by its name "
            "'module:function'",
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
    """Whether an argument is more than names: those are in the recipe."""
    if isinstance(value, Mapping):
        return any(map(_is_object, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_object, value))
    return not isinstance(value, str | int | float)
