"""Reads a recipe from a file or a mapping, with overrides, and writes it as YAML."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from trainwright.errors import Problem, RecipeError, UsageError
from trainwright.recipe.duration import Duration
from trainwright.recipe.formatting import format_value, readable
from trainwright.recipe.outline import (
    choices,
    closest_choice,
    field_at,
    for_unknown_key,
    is_index,
    is_list,
    section_at,
    section_in,
)
from trainwright.recipe.schema import PLANNED, Parallel, Recipe
from trainwright.recipe.section import Part, Section
from trainwright.recipe.source import Place, Source
from trainwright.recipe.yaml_core import Document, UnreadableError, core_tag, read, write
from trainwright.runs.secrets import MASK, is_secret, masked

ENV_PREFIX = "TRAINWRIGHT_"
RESERVED_ENV = frozenset(
    {"CACHE", "DOCTOR", "EXAMINE", "EXIT_CODES", "GRACE_S", "HOME", "LANG", "METRICS", "PAGE_PARENT", "PAGE_TOKEN"}
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
    if isinstance(value, Integral) and type(value).__module__ == "numpy":
        value = int(value)
    return None if keys is None else Override(keys, value, where)


def _keys(path: object, where: str, problems: list[Problem]) -> tuple[str, ...] | None:
    keys = tuple(path.split(".")) if isinstance(path, str) else ()
    if keys and all(keys) and len(keys) <= 50:
        return keys
    rule, remedy = "is not a path: keys joined by dots", "write for example optimizer.lr"
    problems.append(Problem("", rule, got=format_value(path), remedy=remedy, where=where))
    return None


def apply(document: Document, overrides: Iterable[Override]) -> None:
    """Apply the overrides to the document, in their order; copies the containers that it changes.

    Another ``checkpoint.best`` drops the document's ``best_mode``, which belongs to the metric that it replaces.
    """
    overrides = list(overrides)
    paths = {override.keys for override in overrides}
    if ("checkpoint", "best") in paths and ("checkpoint", "best_mode") not in paths:
        _drop_best_mode(document)
    for override in overrides:
        _put_value(document, override)


def _drop_best_mode(document: Document) -> None:
    assert isinstance(document.value, Mapping)
    if isinstance(section := document.value.get("checkpoint"), Mapping):
        kept = {key: value for key, value in section.items() if key != "best_mode"}
        document.value = {**document.value, "checkpoint": kept}


def _put_value(document: Document, override: Override) -> None:
    """Walk to the parent of the path, create missing sections on the way, and set the value there."""
    assert isinstance(document.value, Mapping)
    here: Any = dict(document.value)
    document.value = here
    for depth, key in enumerate(override.keys):
        path = override.keys[: depth + 1]
        slot = _slot(here, key)
        if slot is None:
            document.problems.append(_no_place(override, path, here))
            return
        if depth == len(override.keys) - 1:
            here[slot] = override.value
            _forget(document, ".".join(path))
            document.places[".".join(path)] = Place(override.where)
            return
        child = _container(here[slot], path, next_key=override.keys[depth + 1])
        if child is None:
            document.problems.append(_no_place(override, override.keys[: depth + 2], here[slot]))
            return
        if here[slot] is None:
            document.places[".".join(path)] = Place(override.where)
        here[slot] = child
        here = child


def _forget(document: Document, path: str) -> None:
    """Remove a value that an override replaces from ``places`` and ``unreadable``."""
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
    """Return the key or index to set, which ``here`` has afterwards; None if a list can have no such index."""
    if isinstance(here, dict):
        here.setdefault(key, None)
        return key
    if not is_index(key) or int(key) > len(here):
        return None
    if int(key) == len(here):
        here.append(None)
    return int(key)


def _no_place(override: Override, path: tuple[str, ...], here: object) -> Problem:
    parent = ".".join(path[:-1])
    if isinstance(here, list):
        rule = f"{parent} is a list of {len(here)}: its items are {parent}.0, {parent}.1, ..."
        remedy = f"use an index from 0 to {len(here)} ({len(here)} appends)"
    else:
        rule, remedy = f"{parent} is {format_value(here)} and holds no keys", f"set {parent} itself"
    return Problem(".".join(path), rule, got=format_value(override.value), remedy=remedy, where=override.where)


MAX_BYTES = 1_000_000
_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Loaded:
    """A validated recipe, and the place where each of its values was written.

    Args:
        within_s: Limit in wall-clock seconds from the first step of the run to its end, everything included; None if
            there is no limit.
        cost: The limit in USD or kWh from which ``recipe.until`` is estimated; None without such a limit.
        stated: The paths that the recipe or an override states.
        by_preset: The paths that the preset has set. All other paths have their defaults.
        by_plan: The paths that were left open (``auto``) and that the plan has decided for this run.
    """

    recipe: Recipe
    source: Source
    within_s: float | None = None
    cost: Duration | None = None
    stated: frozenset[str] = frozenset()
    by_preset: frozenset[str] = frozenset()
    by_plan: frozenset[str] = frozenset()

    @property
    def as_written(self) -> Recipe:
        """The recipe with its limit in USD or kWh, if it has one."""
        return self.recipe if self.cost is None else self.recipe.model_copy(update={"until": self.cost})

    @property
    def overridden(self) -> frozenset[str]:
        """The paths that an override has set: ``--set``, the environment, or an argument in Python."""
        return frozenset(path for path, place in self.source.places.items() if not place.line)


def load(path: str | Path, *, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Loaded:
    """Read the recipe in a YAML file.

    Args:
        path: The file. A name without a suffix, such as ``gpt-tiny``, is a built-in recipe unless a file has that name.
        overrides: Values as ``path=value``. They replace values in the environment and in the file.
        environ: The environment, `os.environ` by default. ``TRAINWRIGHT_PATH=value`` replaces a value in the file.

    Returns:
        The validated recipe, with the place where each of its values was written.

    Raises:
        RecipeError: With every problem of the recipe at once.
    """
    path = _builtin_path(Path(path))
    name = readable(str(path))
    try:
        document = read(_text(path, name), name)
    except UnreadableError as error:
        raise RecipeError(error.problem) from None
    if document.value is None:
        raise _cannot_read(name, "is empty", "write at least model and data", format_value(None))
    if not isinstance(document.value, dict):
        remedy = "write key: value lines, beginning with model: and data:"
        raise _cannot_read(name, "must be a mapping of keys to values", remedy, format_value(document.value))
    return _load_document(document, overrides, os.environ if environ is None else environ)


def from_mapping(mapping: Mapping[str, object], *, overrides: Sequence[Setting] = (), name: str = "<python>") -> Loaded:
    """Read the recipe in a mapping, which is not changed. The environment is not read.

    ``overrides`` are ``path=value`` in YAML, or pairs of path and value; a later one replaces an earlier one. ``name``
    stands in messages instead of a file. Raises RecipeError with every problem of the recipe at once.
    """
    if not isinstance(mapping, Mapping):
        raise _cannot_read(name, "must be a mapping of keys to values", "pass a dict", format_value(mapping))
    return _load_document(Document(name, dict(mapping)), overrides, {})


def dump(recipe: Recipe) -> str:
    """Return the complete recipe as YAML, including defaults, which `load` reads back unchanged."""
    return write(recipe.model_dump())


def dump_masked(recipe: Recipe) -> str:
    """Return the recipe as ``dump`` does, without secrets, because people share run folders."""
    return write(masked(recipe.model_dump()))


def _load_document(document: Document, overrides: Sequence[Setting], environ: Mapping[str, str]) -> Loaded:
    apply(document, from_environment(environ, document.problems) + from_settings(overrides, document.problems))
    source = Source(document.name, document.places)
    assert isinstance(document.value, dict)
    current = without_former_keys(document.value)
    stated = frozenset(stated_paths(current))
    mapping, by_preset = with_preset(current)
    recipe = validate_recipe(mapping, source, document.problems, frozenset(document.unreadable))
    return Loaded(recipe, source, stated=stated, by_preset=by_preset)


def builtin_recipes() -> Path:
    """Return the folder of the built-in recipes: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parent.parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def _builtin_path(path: Path) -> Path:
    shipped = {file.stem: file for file in _recipes(builtin_recipes())}.get(str(path))
    return path if shipped is None or (path.exists() and not path.is_dir()) else shipped


def _cannot_read(where: str, rule: str, remedy: str, got: str = "") -> RecipeError:
    return RecipeError(Problem("", rule, got=got, remedy=remedy, where=where))


def _text(path: Path, name: str) -> str:
    try:
        with _open(path) as file:
            content = file.read(MAX_BYTES + 1)
    except IsADirectoryError:
        raise _cannot_read(name, "is a folder, not a recipe file", _recipes_in(path)) from None
    except FileNotFoundError:
        raise _cannot_read(name, "does not exist", _did_you_mean(path)) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise _cannot_read(name, f"cannot be opened: {error}", "check the path and its permissions") from None
    if len(content) > MAX_BYTES:
        raise _cannot_read(name, f"must not be larger than {MAX_BYTES} bytes", "is this a recipe?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        remedy = "save it as UTF-8 text"
        raise _cannot_read(f"{name}:{line}", "is not UTF-8 text", remedy) from None


def _open(path: Path) -> BinaryIO:
    """Open a recipe. A pipe is accepted only if a shell has made it: any other would wait for its writer."""
    if path.is_fifo() and path.parts[1:2] not in (("dev",), ("proc",)):
        raise OSError("it is a pipe, not a file")
    return path.open("rb")


def _recipes(folder: Path) -> list[Path]:
    try:
        return sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES)
    except OSError:
        return []


def _recipes_in(folder: Path) -> str:
    found = _recipes(folder)
    return f"choose one of {', '.join(str(file) for file in found[:8])}" if found else "give the path of a YAML file"


def _did_you_mean(path: Path) -> str:
    nearby: dict[str, Path] = {}
    for folder in (path.parent, Path("recipes"), builtin_recipes()):  # the first of two with the same name
        for file in _recipes(folder):
            nearby.setdefault(file.stem, file)
    close = difflib.get_close_matches(path.stem[:100], nearby, n=1)
    if close:
        return f"did you mean {nearby[close[0]]}?"
    if nearby:
        return f"recipes nearby: {', '.join(str(file) for file in list(nearby.values())[:8])}"
    return "give the path of a YAML file; there is none nearby"


Settings = Mapping[str, object]

FORMER_DEFAULTS: Settings = {
    "model.qat": None,
    "parallel.compress": "none",
    "parallel.compress_rank": 4,
    "parallel.compress_after": 1000,
}
"""Keys of earlier versions by path, with their defaults. Recipes in run folders and checkpoints contain them."""


def without_former_keys(recipe: Mapping[str, object]) -> dict[str, object]:
    """Return a raw recipe without keys of earlier versions, if they have their default value."""
    found = dict(recipe)
    for path, default in FORMER_DEFAULTS.items():
        name, _, former = path.partition(".")
        section = found.get(name)
        if isinstance(section, Mapping) and former in section and section[former] == default:
            found[name] = {key: value for key, value in section.items() if key != former}
    return found


RECOMMENDED: Mapping[str, Settings] = {
    "precision": {"precision": "auto"},
    "optimizer.decay_norms_and_biases": {"optimizer.decay_norms_and_biases": False},
    "optimizer.clip": {"optimizer.clip.by": "norm", "optimizer.clip.at": 1.0},
    "schedule.use": {"schedule.use": "cosine", "schedule.warmup": "0.05run"},
}
"""Settings of the preset by path. They apply only if the recipe states neither this path nor one below it: a recipe
that names a schedule gets no warm-up."""
SGD: Settings = {"optimizer.args.momentum": 0.9}
SHORT_FORMS = ("model", "loss", "optimizer", "schedule")
"""Sections for which a bare name is short for ``{use: name}``."""
MAX_PATH_KEYS = 4
"""The maximum number of keys in a path of ``stated``. Arguments may nest deeper; from Python, without limit."""


def with_preset(recipe: Mapping[str, object]) -> tuple[dict[str, object], frozenset[str]]:
    """Return a raw recipe with the settings of its preset, and the paths that the preset has set.

    Values that the recipe states stay. A recipe without a preset, or with an unknown one, is returned unchanged.
    """
    if recipe.get("preset") != "recommended":
        return dict(recipe), frozenset()
    stated = frozenset(stated_paths(recipe))
    filled = dict(recipe)
    added = set()
    groups = [settings for path, settings in RECOMMENDED.items() if not _states(stated, path)]
    if _optimizer_of(recipe) == "sgd":
        groups.append(SGD)
    for path, value in ((path, value) for settings in groups for path, value in settings.items()):
        if path not in stated and _put(filled, path.split("."), value):
            added.add(path)
    return filled, frozenset(added)


def stated_paths(recipe: object, above: str = "") -> Iterator[str]:
    """Yield the dotted path of every value that a raw recipe states; a bare name of a section states its ``use``."""
    if isinstance(recipe, Mapping) and above.count(".") < MAX_PATH_KEYS - 1:
        for key, value in recipe.items():
            if isinstance(key, str):
                yield from stated_paths(value, f"{above}.{key}" if above else key)
    elif isinstance(recipe, str) and above in SHORT_FORMS:
        yield f"{above}.use"
    elif above:
        yield above


def _states(stated: frozenset[str], path: str) -> bool:
    return any(each == path or each.startswith(f"{path}.") for each in stated)


def _optimizer_of(recipe: Mapping[str, object]) -> object:
    section = recipe.get("optimizer")
    return section.get("use") if isinstance(section, Mapping) else section


def _put(section: dict[str, object], keys: list[str], value: object) -> bool:
    """Set a value and copy the sections on the way to it. Return False if one of them is not a mapping."""
    if len(keys) == 1:
        section[keys[0]] = value
        return True
    inside = section.get(keys[0])
    inside = {} if inside is None else {"use": inside} if isinstance(inside, str) else inside
    if not isinstance(inside, Mapping):
        return False
    section[keys[0]] = below = dict(inside)
    return _put(below, keys[1:], value)


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
    """Sort key: problems of the file by line, then problems of overrides."""
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
    is_hidden = is_secret(problem.path) or problem.path in ("alerts.webhook", "alerts.apprise")  # perhaps an address
    got = MASK if problem.got and is_hidden else masked(problem.got)
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
        rule = f"is not a key of {'.'.join(keys[:-1]) or 'a recipe'}"
        return Problem(path, rule, got=format_value(got), remedy=for_unknown_key(keys))
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


def _for_bool(got: object, _field: FieldInfo | None) -> str:
    word = str(got).lower() if isinstance(got, (str, int)) and abs(len(str(got))) < 9 else ""
    if word in ("yes", "on", "y", "1", "true"):
        return "write true, without quotes"
    return "write false, without quotes" if word in ("no", "off", "n", "0", "false") else "write true or false"


def _for_text(got: object, field: FieldInfo | None) -> str:
    if isinstance(got, (int, float)):
        return f"put quotes around it: '{format_value(got)}'"
    return f"write {_example(field)}"


def _for_list(got: object, _field: FieldInfo | None) -> str:
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
    "invalid_key": lambda _got, _field: "put quotes around the key, or delete it",
    "string_unicode": lambda _got, _field: "write the character itself",
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
    if default is None and (section := section_in(field.annotation)):
        default = section.model_construct()
    if isinstance(default, Section):
        return "{" + ", ".join(f"{key}: {_plain(value)}" for key, value in list(default)[:2] if _plain(value)) + "}"
    return _plain(default) or ("[a, b]" if is_list(field) else "a value")


def _plain(value: object) -> str:
    """Return a default as written in YAML, or "" if it cannot serve as an example."""
    if value is None or isinstance(value, (Section, dict, list, tuple)):
        return ""
    return format_value(value) if isinstance(value, (bool, int, float)) else str(value)
