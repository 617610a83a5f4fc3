"""Finds what the schema allows at a dotted path, for "did you mean" and for overrides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from trainwright.recipe.schema import Recipe
from trainwright.recipe.section import Section


def section_at(keys: Sequence[str]) -> type[Section] | None:
    """Return the section at this path, or None if the path is that of a value."""
    if not keys:
        return Recipe
    field = field_at(keys)
    return _section_in(field.annotation) if field else None


def field_at(keys: Sequence[str]) -> FieldInfo | None:
    """Return the field at this path; the index of a list counts as the list itself."""
    section: type[Section] | None = Recipe
    field: FieldInfo | None = None
    for key in keys:
        if field is not None and is_list(field) and is_index(key):
            continue
        field = section.model_fields.get(key) if section else None
        section = _section_in(field.annotation) if field else None
    return field


def is_list(field: FieldInfo) -> bool:
    """Return True if the field holds a list."""
    return get_origin(field.annotation) is tuple


def is_index(key: str) -> bool:
    """Return True if ``key`` can be an index into a list."""
    return key.isascii() and key.isdecimal() and len(key) <= 6


def choices(field: FieldInfo) -> tuple[object, ...]:
    """Return the values of a field that has a closed list of them."""
    return tuple(_literals(field.annotation))


def keys_named(key: str) -> list[str]:
    """Return every path in the schema that ends in this key, the nearest to the top first."""
    return sorted((path for path in _paths(Recipe, "") if path.split(".")[-1] == key), key=lambda path: path.count("."))


def _paths(section: type[Section], above: str) -> Iterator[str]:
    for key, field in section.model_fields.items():
        yield above + key
        inner = _section_in(field.annotation)
        if inner and not is_list(field):  # a remedy cannot name an item of a list
            yield from _paths(inner, f"{above}{key}.")


def _section_in(annotation: object) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section_in(part))), None)


def _literals(annotation: object) -> Iterator[object]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for part in get_args(annotation):
            yield from _literals(part)
