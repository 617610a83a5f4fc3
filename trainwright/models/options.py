"""Reads keyword options into a frozen config class; an unknown option is an error with a remedy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

from trainwright.errors import UsageError, suggest

Config = TypeVar("Config")


def configure(config_class: type[Config], options: Mapping[str, object], *, of: str) -> Config:
    """Return ``config_class(**options)``. Raises UsageError for an unknown or missing option of factory ``of``."""
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


def require_counts(config: object, least: Mapping[str, int]) -> None:
    """Raise UsageError unless each named attribute is an int of at least this value."""
    for name, floor in least.items():
        require_count(name, getattr(config, name), floor)


def require_count(name: str, value: object, least: int = 1) -> None:
    """Raise UsageError unless ``value`` is an int of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} must be a whole number >= {least}; got {value!r}", remedy=f"try {name}={least}")


def require_divisible_heads(d_model: int, heads: int) -> None:
    """Raise UsageError unless the heads divide ``d_model``."""
    if d_model % heads:
        nearest = max(1, round(d_model / heads)) * heads
        raise UsageError(f"d_model={d_model} is not divisible by heads={heads}", remedy=f"try d_model={nearest}")


def require_block_size(length: int, block_size: int) -> None:
    """Raise UsageError if an input of ``length`` positions is too long for the model."""
    if length > block_size:
        raise UsageError(
            f"the input has {length} positions, the model block_size={block_size}",
            remedy=f"cut the input, or build the model with block_size={length}",
        )


def require_dropout(value: float) -> None:
    """Raise UsageError unless ``0 <= value < 1``."""
    if not 0 <= value < 1:
        raise UsageError(f"dropout must be in [0, 1); got {value!r}", remedy="dropout=0.0 turns it off")
