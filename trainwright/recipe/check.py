"""Converts pydantic's errors to Problems: all at once, sorted by line, each with a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from trainwright.errors import Problem, RecipeError, UsageError
from trainwright.recipe.formatting import format_value, readable
from trainwright.recipe.outline import choices, field_at, is_index, is_list, section_at
from trainwright.recipe.schema import Recipe
from trainwright.recipe.section import Part, Section
from trainwright.recipe.source import Source
from trainwright.recipe.suggest import closest_choice, for_unknown_key
from trainwright.recipe.yaml_core import core_tag
from trainwright.runs.secrets import MASK, is_secret, masked

# The rule for each error type of pydantic; {names} are filled from the context of the error.
_RULES = {
    "missing": "is required",
    "extra_forbidden": "is not a key of a recipe",
    "invalid_key": "keys must be text",
    "string_unicode": "must be valid Unicode text",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le}",
}


def validate_recipe(
    mapping: Mapping[str, object],
    source: Source,
    earlier: Sequence[Problem] = (),
    unreadable: frozenset[str] = frozenset(),
) -> Recipe:
    """Return the Recipe of ``mapping``.

    ``earlier`` holds the problems found while reading; at paths in ``unreadable`` no further problem is reported.
    Raises RecipeError with every problem.
    """
    try:
        recipe = Recipe.model_validate(dict(mapping))
    except ValidationError as error:
        found = problems_of(error, source)
    else:
        found = []
    problems = [*earlier, *(problem for problem in found if problem.path not in unreadable)]
    if problems:
        raise RecipeError(sorted(map(_without_secret, problems), key=lambda problem: _order(problem, source)))
    return recipe


def problems_of(error: ValidationError, source: Source) -> list[Problem]:
    """Return every problem of a ValidationError of `Recipe`, in pydantic's order."""
    problems = []
    for detail in error.errors(include_url=False):
        keys = tuple(
            readable(key) if isinstance(key, str) else format_value(key) for key in detail["loc"] if key != "[key]"
        )
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, RecipeError):
            found = [_below(keys, problem) for problem in cause.problems]
        else:
            found = [_translate(keys, dict(detail), cause)]
        problems += [_locate(problem, source) for problem in found]
    return problems


def _order(problem: Problem, source: Source) -> tuple[bool, int]:
    """Sort key: problems of the file by line, then those of overrides."""
    match = re.search(r":([0-9]+)$", problem.where)
    in_file = problem.where == source.name or (match is not None and problem.where.startswith(f"{source.name}:"))
    return not in_file, int(match[1]) if match and in_file else 0


def _below(keys: tuple[str, ...], problem: Problem) -> Problem:
    path = ".".join(part for part in (*keys, problem.path) if part)
    return Problem(path, problem.rule, got=problem.got, remedy=problem.remedy)


def _locate(problem: Problem, source: Source) -> Problem:
    where = source.where(problem.path)
    return Problem(problem.path, problem.rule, got=problem.got, remedy=readable(problem.remedy), where=where)


def _without_secret(problem: Problem) -> Problem:
    got = MASK if problem.got and is_secret(problem.path) else masked(problem.got)
    return replace(problem, got=got)


def _translate(keys: tuple[str, ...], detail: dict[str, Any], cause: object) -> Problem:
    path = ".".join(keys)
    kind = str(detail["type"])
    got = detail.get("input")
    if isinstance(cause, UsageError):
        return Problem(path, cause.message, got=format_value(got), remedy=cause.remedy)
    if kind == "missing":
        return Problem(path, _RULES[kind], remedy=_add(keys))
    if kind == "extra_forbidden":
        return Problem(path, _unknown_key_rule(keys), got=format_value(got), remedy=for_unknown_key(keys))
    field = field_at(keys)
    if kind == "literal_error" and field is not None:
        allowed = choices(field)
        names = [value if isinstance(value, str) else format_value(value) for value in allowed]
        return Problem(
            path, f"must be one of {', '.join(names)}", got=format_value(got), remedy=closest_choice(got, allowed)
        )
    rule = _RULES.get(kind, str(detail["msg"])).format(**detail.get("ctx", {}))
    section = section_at(keys)
    if kind == "model_type" and section is not None and issubclass(section, Part):
        rule = "must be a name, or a mapping with use and args"
    return Problem(path, rule, got=format_value(got), remedy=_remedy(kind, keys, got))


def _unknown_key_rule(keys: tuple[str, ...]) -> str:
    return f"is not a key of {'.'.join(keys[:-1]) or 'a recipe'}"


def _remedy(kind: str, keys: tuple[str, ...], got: object) -> str:
    field, section = field_at(keys), section_at(keys)
    if keys and is_index(keys[-1]) and section is not None:
        needed = [f"{key}: {_example_value(item)}" for key, item in section.model_fields.items() if item.is_required()]
        return f"write for example {{{', '.join(needed)}}}"
    if kind in _REMEDIES:
        return _REMEDIES[kind](got, field)
    return f"write {_example(field)}"


def _for_number(got: object, field: FieldInfo | None) -> str:
    if isinstance(got, str):
        if core_tag(got.strip()).endswith((":int", ":float")):
            return f"remove the quotes: {got.strip()}"
        bare = re.sub(r"(?<=[0-9])[_, ](?=[0-9]{3})", "", got)
        if core_tag(bare).endswith((":int", ":float")):
            return f"write {bare}"
    if isinstance(got, float) and got.is_integer() and abs(got) < 1e15:
        return f"write {int(got)}"
    return f"write {_example(field)}"


def _for_bool(got: object, field: FieldInfo | None) -> str:
    word = str(got).lower() if isinstance(got, (str, int)) and abs(len(str(got))) < 9 else ""
    if word in ("yes", "on", "y", "1", "true"):
        return "write true, without quotes"
    return "write false, without quotes" if word in ("no", "off", "n", "0", "false") else "write true or false"


def _for_text(got: object, field: FieldInfo | None) -> str:
    if isinstance(got, (int, float)):
        return f"put quotes around it: '{format_value(got)}'"
    return f"write {_example(field)}"


def _for_list(got: object, field: FieldInfo | None) -> str:
    return (
        f"write [{got}]"
        if isinstance(got, str) and len(got) < 60
        else "write it in brackets, [a, b], or as lines with -"
    )


def _for_mapping(got: object, field: FieldInfo | None) -> str:
    return "give it keys, or delete the line" if got is None else f"write {_example(field)}"


_REMEDIES: dict[str, Callable[[object, FieldInfo | None], str]] = {
    "int_type": _for_number,
    "int_from_float": _for_number,
    "float_type": _for_number,
    "bool_type": _for_bool,
    "string_type": _for_text,
    "tuple_type": _for_list,
    "model_type": _for_mapping,
    "invalid_key": lambda got, field: "put quotes around the key, or delete it",
    "string_unicode": lambda got, field: "write the character itself",
}


def _add(keys: tuple[str, ...]) -> str:
    return f"add {keys[-1]}: {_example_value(field_at(keys))}"


def _example(field: FieldInfo | None) -> str:
    return f"for example {_example_value(field)}"


def _example_value(field: FieldInfo | None) -> str:
    if field is None:
        return "a value"
    if field.examples:
        first = field.examples[0]
        if isinstance(first, dict):
            return "{" + ", ".join(f"{key}: {value}" for key, value in first.items()) + "}"
        return f"'{first}'" if str(first).startswith("*") else str(first)  # * would be an alias
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, Section):
        return "{" + ", ".join(f"{key}: {_plain(value)}" for key, value in list(default)[:2] if _plain(value)) + "}"
    return _plain(default) or ("[a, b]" if is_list(field) else "a value")


def _plain(value: object) -> str:
    """Returns a default as written in YAML, or "" where it is no example."""
    if value is None or isinstance(value, (Section, dict, list, tuple)):
        return ""
    return format_value(value) if isinstance(value, (bool, int, float)) else str(value)
