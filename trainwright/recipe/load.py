"""Reads a recipe from a file or a mapping, with overrides, and writes it as YAML."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from trainwright.errors import Problem, RecipeError
from trainwright.recipe.check import validate_recipe
from trainwright.recipe.formatting import format_value, readable
from trainwright.recipe.override import Setting, apply, from_environment, from_settings
from trainwright.recipe.preset import stated_paths, with_preset
from trainwright.recipe.schema import Recipe
from trainwright.recipe.source import Source
from trainwright.recipe.yaml_core import Document, UnreadableError, read, write
from trainwright.runs.secrets import masked

MAX_BYTES = 1_000_000
_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Loaded:
    """A validated recipe, and the place where each of its values was written.

    Args:
        recipe: The recipe.
        source: The place of each value.
        within_s: Limit in wall-clock seconds from the first step of the run to its end, everything included; None if
            there is no limit.
        energy_kwh: Energy of the device after which the run ends; None if there is no limit.
        stated: The paths that the recipe or an override states.
        by_preset: The paths that the preset has set. All other paths have their defaults.
        by_plan: The paths that were left open (``auto``) and that the plan has decided for this run.
    """

    recipe: Recipe
    source: Source
    within_s: float | None = None
    energy_kwh: float | None = None
    stated: frozenset[str] = frozenset()
    by_preset: frozenset[str] = frozenset()
    by_plan: frozenset[str] = frozenset()

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
    """Read the recipe in a mapping, which is not changed.

    Args:
        mapping: The recipe as nested mappings.
        overrides: ``path=value`` in YAML, or pairs of path and value; a later one replaces an earlier one.
        name: The name in messages, instead of a file.

    Returns:
        The validated recipe. The environment is not read.

    Raises:
        RecipeError: With every problem of the recipe at once.
    """
    if not isinstance(mapping, Mapping):
        raise _cannot_read(name, "must be a mapping of keys to values", "pass a dict", format_value(mapping))
    return _load_document(Document(name, dict(mapping)), overrides, {})


def dump(recipe: Recipe) -> str:
    """Return the complete recipe as YAML, including defaults, which `load` reads back unchanged."""
    return write(recipe.model_dump())


def dump_masked(recipe: Recipe) -> str:
    """Return the recipe as ``dump`` does, without secrets, because a run folder is copied and sent."""
    return write(masked(recipe.model_dump()))


def _load_document(document: Document, overrides: Sequence[Setting], environ: Mapping[str, str]) -> Loaded:
    apply(document, from_environment(environ, document.problems) + from_settings(overrides, document.problems))
    source = Source(document.name, document.places)
    assert isinstance(document.value, dict)
    stated = frozenset(stated_paths(document.value))
    mapping, by_preset = with_preset(document.value)
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
