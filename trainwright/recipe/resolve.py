"""Resolves ``use: package.module:callable`` to the live object; every error names file:line of the recipe."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from trainwright.errors import MissingExtra, Problem, RecipeError, UsageError, install_remedy, text_of, unknown_args
from trainwright.recipe import Row, require_unmasked
from trainwright.recipe.load import Loaded
from trainwright.recipe.source import Source

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
LIVE = "live"
"""The module in ``use:`` of an object that was passed in Python and cannot be built from a file."""


def is_live(use: str) -> bool:
    """Return True for an object that was passed to ``tw.fit`` in Python, which a recipe file cannot build."""
    return use.startswith(f"{LIVE}:")


def import_factory(factory: str) -> Callable[..., Any]:
    """Return the callable that a row of the catalog names as ``package.module:callable``."""
    return pkgutil.resolve_name(factory)  # type: ignore[no-any-return]


def find(use: str, names: Mapping[str, Row], path: str, source: Source) -> Callable[..., Any]:
    """Return the callable of a name in ``names`` or of ``package.module:callable``, without calling it.

    The current folder and the recipe's folder are added to the import path. Raises RecipeError with the rule and the
    remedy.
    """
    target = names[use].factory if use in names else use
    module_name, _, attribute = target.partition(":")
    here, beside = search_beside(source)

    def problem(rule: str, remedy: str) -> RecipeError:
        return RecipeError(Problem(f"{path}.use", rule, got=use, remedy=remedy, where=source.where(f"{path}.use")))

    if module_name == LIVE:
        rule = f"is the {attribute} that was passed in Python, and no file builds it"
        raise problem(rule, "name it as package.module:callable in a recipe, or continue in Python")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            places = " and ".join(dict.fromkeys([here, beside]))
            near = _nearest_module(error.name, [here, beside])
            file = f"{error.name.replace('.', '/')}.py"
            remedy = f"run it in the folder that has {file}, check the spelling, or install the package that has it; it"
            remedy = f"did you mean {near!r}? It" if near else remedy
            remedy += f" is searched in {places} and the installed packages"
            raise problem(f"there is no module {error.name!r}", remedy) from None
        raise problem(f"{module_name} needs the module {error.name!r}", install_remedy(error.name or "")) from None
    except Exception as error:
        raise problem(f"importing {module_name} raised {_describe(error)}", "make the module importable") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            close = get_close_matches(part, dir(found), n=1)
            meant = f"did you mean {close[0]!r}?" if close else f"it has: {', '.join(_public(found))}"
            raise problem(f"{module_name} has no {part!r}", meant)
        found = getattr(found, part)
    if not callable(found):
        raise problem(f"{target} is a {type(found).__name__} and cannot be called", "name a class or a function")
    return found  # type: ignore[no-any-return]


def search_beside(source: Source) -> tuple[str, str]:
    """Add the current folder and the recipe's folder to the import path, and return both."""
    here, beside = str(Path.cwd()), str(source.folder)
    if here not in sys.path:
        sys.path.insert(0, here)
    if beside not in sys.path:
        sys.path.insert(sys.path.index(here) + 1, beside)
    return here, beside


def parameters_of(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a callable by name; none for a builtin that has no signature."""
    try:
        return inspect.signature(factory).parameters
    except ValueError:
        return {}


def make(use: str, args: Mapping[str, object], names: Mapping[str, Row], path: str, source: Source) -> Any:
    """Return the result of the callable with ``args``. Raises RecipeError for any error in it."""
    require_unmasked(args, f"{path}.args", source)
    factory = find(use, names, path, source)
    at = f"{path}.args" if args else f"{path}.use"

    def problem(rule: str, remedy: str) -> RecipeError:
        return RecipeError(Problem(at, rule, got=use, remedy=remedy, where=source.where(at)))

    require_arguments(factory, args, use, path, source)
    try:
        return factory(**args)
    except MissingExtra:
        raise
    except UsageError as error:
        raise problem(error.message, error.remedy) from None
    except Exception as error:
        raise problem(f"{use} raised {_describe(error)}", "call it directly with these arguments") from None


def require_arguments(
    factory: Callable[..., Any], args: Mapping[str, object], use: str, path: str, source: Source
) -> None:
    """Raise RecipeError with every unknown and every missing argument of a callable."""
    try:
        signature = inspect.signature(factory)
    except ValueError:
        return  # a builtin without a signature
    known = {name: each for name, each in signature.parameters.items() if each.kind in _BY_NAME}
    at, found = f"{path}.args" if args else f"{path}.use", list[Problem]()
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values()):
        found = unknown_args(use, f"{path}.args", args, list(known))
    for name, each in known.items():
        is_misspelt = any(f"did you mean {name!r}?" in other.remedy for other in found)
        if each.default is inspect.Parameter.empty and name not in args and not is_misspelt:
            found.append(Problem(at, f"{use} needs the argument {name!r}", remedy=f"add {path}.args.{name}"))
    if found:
        raise RecipeError([replace(each, where=source.where(each.path)) for each in found])
    try:
        signature.bind(**args)
    except TypeError as error:  # for example a positional-only argument
        remedy = f"it accepts: {', '.join(known)}"
        raise RecipeError(Problem(at, f"{use}: {error}", got=use, remedy=remedy, where=source.where(at))) from None


def _nearest_module(name: str, places: Sequence[str]) -> str:
    """Return the module with the nearest name in the same package, or in ``places``; "" if none is near."""
    package, _, last = name.rpartition(".")
    if package:
        places = list(getattr(sys.modules.get(package), "__path__", ()))
    near = get_close_matches(last[:100], [each.name for each in pkgutil.iter_modules(places)], n=1)
    return f"{package}.{near[0]}" if near and package else "".join(near)


def _describe(error: Exception) -> str:
    """Return the error as text, with the line that raised it, unless the call in this file itself raised it."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{text_of(error)}{at}"


def _public(module: object) -> list[str]:
    return [name for name in dir(module) if not name.startswith("_")][:12]


_CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""``package.module:attribute``."""
TRUST = "trust_remote_code"


def require_allowed(loaded: Loaded, packages: Sequence[str]) -> None:
    """Raise RecipeError, with every place, if the recipe names a callable outside of ``packages``.

    ``packages`` are names of packages or modules: ``torch.nn`` allows ``torch.nn:MSELoss``, not ``torch.hub:load``.
    The names of built-in parts (``adamw``, ``cosine``) are always allowed. ``trust_remote_code: true`` is allowed if
    ``packages`` has ``trust_remote_code``.
    """
    problems = []
    for path, use in _callables(loaded.recipe.model_dump(mode="json"), ""):
        module = use.partition(":")[0]
        if module == "live":  # an object that was passed in Python: nothing is imported by this name
            continue
        if not any(f"{module}.".startswith(f"{each}.") for each in packages):
            remedy = f"read what it does; to run it, add --allow {module}"
            where = loaded.source.where(path)
            problems.append(Problem(path, f"{module} is not allowed", got=use, remedy=remedy, where=where))
    if problems:
        raise RecipeError(problems)


def _callables(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield every string of a recipe that may be imported and called, with its path."""
    if isinstance(value, str) and _CALLABLE.fullmatch(value):
        yield path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            if key == TRUST and each is True:  # it runs the files of a repository
                yield f"{path}.{key}", TRUST
            yield from _callables(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _callables(each, f"{path}.{index}")
