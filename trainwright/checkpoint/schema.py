"""Schema of values that are read from a file: keys, items and kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from torch import Tensor

from trainwright.checkpoint.codec import Tree
from trainwright.checkpoint.stored import StoredTensor


class Kind(NamedTuple):
    """Condition on a single value. ``name`` describes it in errors."""

    name: str
    holds: Callable[[Tree], bool]


class Maybe(NamedTuple):
    """Also accepts None or {}: the run had no such part."""

    rule: Rule


Rule: TypeAlias = "Kind | Maybe | list[Rule] | dict[str, Rule]"
"""A list contains items of one rule.

A dict must have these keys ('*': all keys; 'name?': optional), and may have others.
"""

ANYTHING = Kind("a value", lambda value: True)
TEXT = Kind("a text", lambda value: isinstance(value, str))
TENSOR = Kind("a tensor", lambda value: isinstance(value, Tensor | StoredTensor))
NATURAL = Kind("a whole number from 0 to 2^63 - 1", lambda value: type(value) is int and 0 <= value < 2**63)
AMOUNT = Kind("a finite number from 0", lambda value: type(value) in (int, float) and 0 <= value < 2.0**1023)
FLOAT = Kind("a number", lambda value: type(value) is float)


def violations(value: Tree, rule: Rule, path: str) -> Iterator[str]:
    """Yield descriptions of what in ``value``, named ``path``, breaks the rule."""
    match rule:
        case Maybe(rule=inner) if value is not None and value != {}:
            yield from violations(value, inner, path)
        case Kind(name=name, holds=holds) if not holds(value):
            yield f"{path} is {_brief(value)}, not {name}"
        case list() if not isinstance(value, list | tuple):
            yield f"{path} is {_brief(value)}, not a list"
        case list():
            for index, each in enumerate(value):
                yield from violations(each, rule[0], f"{path}.{index}")
        case dict() if not isinstance(value, dict):
            yield f"{path} is {_brief(value)}, not a mapping"
        case dict():
            for key, below in rule.items():
                yield from _violations_below(value, key, below, path)


def _violations_below(value: Mapping[str, Tree], key: str, rule: Rule, path: str) -> Iterator[str]:
    if key == "*":
        for name, each in value.items():
            yield from violations(each, rule, f"{path}.{name}")
    elif (name := key.removesuffix("?")) in value:
        yield from violations(value[name], rule, f"{path}.{name}")
    elif name == key:
        yield f"{path} has no {name!r}"


def _brief(value: Tree) -> str:
    if isinstance(value, Tensor | StoredTensor):
        return f"a tensor of {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
