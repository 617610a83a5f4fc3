"""Reads keyword options into a frozen config class, so that a typo ends in a sentence, not in a traceback."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from trainwright.errors import UsageError

Config = TypeVar("Config")


def configure(config_class: type[Config], options: Mapping[str, Any], *, of: str) -> Config:
    """``config_class(**options)``. Raises UsageError for an unknown or missing option of factory ``of``."""
    fields = dataclasses.fields(config_class)  # type: ignore[arg-type]
    names = [field.name for field in fields]
    for name in options:
        if name not in names:
            raise UsageError(f"{of} has no option {name!r}", remedy=suggest(name, names))
    required = [field.name for field in fields if field.default is dataclasses.MISSING]
    missing = [name for name in required if name not in options]
    if missing:
        raise UsageError(f"{of} needs {', '.join(missing)}", remedy=f"give {missing[0]}=<value>")
    return config_class(**options)


def suggest(name: str, known: Iterable[str]) -> str:
    """A remedy for an unknown name: the nearest known ones, or all of them when none is near."""
    names = list(known)
    near = get_close_matches(name, names, n=3, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(repr(each) for each in near)}?"
    return f"known are: {', '.join(names)}"


def require_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raises UsageError unless ``value`` is one of ``choices``."""
    if value not in (names := list(choices)):
        remedy = suggest(str(value), names)
        raise UsageError(f"{name} must be one of {', '.join(names)}; got {value!r}", remedy=remedy)


def require_counts(config: object, least: Mapping[str, int]) -> None:
    """Raises UsageError unless each named attribute is an int of at least the given size."""
    for name, floor in least.items():
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < floor:
            raise UsageError(f"{name} must be a whole number >= {floor}; got {value!r}", remedy=f"try {name}={floor}")


def require_dropout(value: float) -> None:
    """Raises UsageError unless ``0 <= value < 1``."""
    if not 0 <= value < 1:
        raise UsageError(f"dropout must be in [0, 1); got {value!r}", remedy="dropout=0.0 turns it off")
