"""Restricts the callables that a foreign recipe may run: ``--allow``.

A recipe names callables, so it is code: running a foreign recipe runs what it names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from trainwright.errors import Problem, RecipeError
from trainwright.recipe.load import Loaded

_CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""``package.module:attribute``."""
TRUST = "trust_remote_code"


def require_allowed(loaded: Loaded, packages: Sequence[str]) -> None:
    """Raise RecipeError, with every place, if the recipe names a callable outside of ``packages``.

    ``packages`` are names of packages or modules: ``torch.nn`` allows ``torch.nn:MSELoss``, not ``torch.hub:load``.
    The names of built-in parts (``adamw``, ``cosine``) are always allowed. ``trust_remote_code: true`` is allowed by
    that name.
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
            yield from _callables(each, f"{path}[{index}]")
