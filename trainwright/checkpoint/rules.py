"""What a value that was read from a file must look like, said as a value: its keys, items and kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from torch import Tensor

from trainwright.checkpoint.codec import Tree


class Kind(NamedTuple):
    """What a single value must be. ``name`` says it in an error."""

    name: str
    holds: Callable[[Tree], bool]


class Maybe(NamedTuple):
    """None or {} is as good: the run had no such part."""

    rule: Rule


Rule: TypeAlias = "Kind | Maybe | list[Rule] | dict[str, Rule]"
"""A list is one of such items. A dict has these keys ('*': all of them; 'name?': it may be missing), and others too."""

ANYTHING = Kind("a value", lambda value: True)
TEXT = Kind("a text", lambda value: isinstance(value, str))
TENSOR = Kind("a tensor", lambda value: isinstance(value, Tensor))
NATURAL = Kind("a whole number from 0 to 2^63 - 1", lambda value: type(value) is int and 0 <= value < 2**63)
AMOUNT = Kind("a finite number from 0", lambda value: type(value) in (int, float) and 0 <= value < 2.0**1023)
FLOAT = Kind("a number", lambda value: type(value) is float)


def wrong(value: Tree, rule: Rule, path: str) -> Iterator[str]:
    """Yields what in ``value``, which is called ``path``, breaks the rule."""
    match rule:
        case Maybe(rule=inner) if value is not None and value != {}:
            yield from wrong(value, inner, path)
        case Kind(name=name, holds=holds) if not holds(value):
            yield f"{path} is {_brief(value)}, not {name}"
        case list() if not isinstance(value, list | tuple):
            yield f"{path} is {_brief(value)}, not a list"
        case list():
            for index, each in enumerate(value):
                yield from wrong(each, rule[0], f"{path}.{index}")
        case dict() if not isinstance(value, dict):
            yield f"{path} is {_brief(value)}, not a mapping"
        case dict():
            for key, below in rule.items():
                yield from _wrong_below(value, key, below, path)


def _wrong_below(value: Mapping[str, Tree], key: str, rule: Rule, path: str) -> Iterator[str]:
    if key == "*":
        for name, each in value.items():
            yield from wrong(each, rule, f"{path}.{name}")
    elif (name := key.removesuffix("?")) in value:
        yield from wrong(value[name], rule, f"{path}.{name}")
    elif name == key:
        yield f"{path} has no {name!r}"


def _brief(value: Tree) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
