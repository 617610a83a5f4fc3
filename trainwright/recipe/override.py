"""Overrides ``--set a.b=value`` and ``TRAINWRIGHT_A__B=value``: single values that replace those of a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from trainwright.errors import Problem
from trainwright.recipe.formatting import format_value, readable
from trainwright.recipe.outline import field_at, is_index, is_list, section_at
from trainwright.recipe.parallel import PLANNED, Parallel
from trainwright.recipe.section import Part
from trainwright.recipe.source import Place
from trainwright.recipe.yaml_core import Document, UnreadableError, read

ENV_PREFIX = "TRAINWRIGHT_"
RESERVED_ENV = frozenset(
    {"CACHE", "DOCTOR", "EXAMINE", "EXIT_CODES", "GRACE_S", "HOME", "METRICS", "PAGE_PARENT", "PAGE_TOKEN"}
)  # Trainwright's settings that are not keys of a recipe

_Container = dict[str, object] | list[object]

Setting = str | tuple[str, object]
"""``path=value`` with the value in YAML, or the path and the value itself."""


@dataclass(frozen=True)
class Override:
    """Sets the value at the path ``keys``; ``where`` names the option or variable that it comes from."""

    keys: tuple[str, ...]
    value: object
    where: str


def from_environment(environ: Mapping[str, str], problems: list[Problem]) -> list[Override]:
    """Return one override per variable, in the order of their names; appends to ``problems``."""
    found = []
    for name in sorted(environ):
        rest = name.removeprefix(ENV_PREFIX)
        if rest == name or rest in RESERVED_ENV:
            continue
        path = readable(rest.lower().replace("__", "."))
        found.append(_override(path, environ[name], f"environment {readable(name)}", problems))
    return [override for override in found if override is not None]


def from_settings(settings: Iterable[Setting], problems: list[Problem]) -> list[Override]:
    """Return one override per setting, in their order; appends to ``problems``."""
    found = []
    for setting in settings:
        if not isinstance(setting, str):
            found.append(_direct(*setting, problems))
            continue
        path, equals, value = setting.partition("=")
        path = readable(path.strip())
        if equals:
            found.append(_override(path, value, f"--set {path}", problems))
        else:
            rule, remedy = "an override is path=value", f"write --set {path or 'optimizer.lr'}=..."
            problems.append(Problem("", rule, got=format_value(setting), remedy=remedy, where=f"--set {path}"))
    return [override for override in found if override is not None]


def _override(path: str, text: str, where: str, problems: list[Problem]) -> Override | None:
    keys = _keys(path, where, problems)
    if keys is None:
        return None
    try:
        document = read(text, where)
    except UnreadableError as error:
        found = error.problem
        remedy = f"put quotes around the value; {found.remedy}"
        problems.append(Problem(path, found.rule, got=format_value(text), remedy=remedy, where=where))
        return None
    for found in document.problems:
        below = f"{path}.{found.path}" if found.path else path
        problems.append(Problem(below, found.rule, got=found.got, remedy=found.remedy, where=where))
    return Override(keys, document.value, where) if not document.problems else None


def _direct(path: object, value: object, problems: list[Problem]) -> Override | None:
    """Return an override from Python, whose value is not parsed."""
    where = f"setting {readable(str(path))}"
    keys = _keys(path, where, problems)
    return None if keys is None else Override(keys, value, where)


def _keys(path: object, where: str, problems: list[Problem]) -> tuple[str, ...] | None:
    keys = tuple(path.split(".")) if isinstance(path, str) else ()
    if keys and all(keys) and len(keys) <= 50:
        return keys
    rule, remedy = "is not a path: keys joined by dots", "write for example optimizer.lr"
    problems.append(Problem("", rule, got=format_value(path), remedy=remedy, where=where))
    return None


def apply(document: Document, overrides: Iterable[Override]) -> None:
    """Apply the overrides to the document, in their order; copies the containers that it changes."""
    for override in overrides:
        _put(document, override)


def _put(document: Document, override: Override) -> None:
    """Walk to the parent of the path, create missing sections on the way, and set the value there."""
    assert isinstance(document.value, Mapping)
    here: _Container = dict(document.value)
    document.value = here
    for depth, key in enumerate(override.keys):
        path = override.keys[: depth + 1]
        slot = _slot(here, key)
        if slot is None:
            document.problems.append(_no_place(override, path, here))
            return
        if depth == len(override.keys) - 1:
            _set(here, slot, override.value)
            _forget(document, ".".join(path))
            document.places[".".join(path)] = Place(override.where)
            return
        child = _container(_get(here, slot), path, next_key=override.keys[depth + 1])
        if child is None:
            document.problems.append(_no_place(override, override.keys[: depth + 2], _get(here, slot)))
            return
        if _get(here, slot) is None:
            document.places[".".join(path)] = Place(override.where)
        _set(here, slot, child)
        here = child


def _forget(document: Document, path: str) -> None:
    """Remove places and faults of a value that an override replaces."""
    document.unreadable = {known for known in document.unreadable if not _under(known, path)}
    document.places = {known: place for known, place in document.places.items() if not _under(known, path)}


def _under(known: str, path: str) -> bool:
    return known == path or known.startswith(path + ".")


def _container(value: object, path: tuple[str, ...], next_key: str = "") -> _Container | None:
    """Return a copy of the value at ``path`` that can take a key, or None for a scalar."""
    if isinstance(value, BaseModel):
        value = dict(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (list, tuple)):
        return list(value)
    if value is None:
        return _new_container(path, next_key)
    section = section_at(path)
    if isinstance(value, str) and section is not None and issubclass(section, Part):
        return {"use": value}
    return dict.fromkeys(PLANNED, "auto") if value == "auto" and section is Parallel else None


def _new_container(path: tuple[str, ...], next_key: str) -> _Container:
    field = field_at(path)
    if field is not None:
        return [] if is_list(field) and not is_index(path[-1]) else {}
    return [] if next_key == "0" and "args" in path else {}


def _slot(here: _Container, key: str) -> str | int | None:
    """Return the key or index to set; the index after the last one appends."""
    if isinstance(here, dict):
        return key
    return int(key) if is_index(key) and int(key) <= len(here) else None


def _get(here: _Container, slot: str | int) -> object:
    if isinstance(here, dict):
        return here.get(str(slot))
    return here[int(slot)] if int(slot) < len(here) else None


def _set(here: _Container, slot: str | int, value: object) -> None:
    if isinstance(here, dict):
        here[str(slot)] = value
    elif int(slot) == len(here):
        here.append(value)
    else:
        here[int(slot)] = value


def _no_place(override: Override, path: tuple[str, ...], here: object) -> Problem:
    parent = ".".join(path[:-1])
    if isinstance(here, list):
        rule = f"{parent} is a list of {len(here)}: its items are {parent}.0, {parent}.1, ..."
        remedy = f"use an index from 0 to {len(here)} ({len(here)} appends)"
    else:
        rule, remedy = f"{parent} is {format_value(here)} and holds no keys", f"set {parent} itself"
    return Problem(".".join(path), rule, got=format_value(override.value), remedy=remedy, where=override.where)
