"""The place where each value of a recipe was written: ``file:line``, ``--set path`` or an environment variable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from trainwright.errors import Problem, RecipeError
from trainwright.runs.secrets import masked_paths


class Place(NamedTuple):
    """``name`` is a file or an override; ``line`` counts from 1, and is 0 for an override."""

    name: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.name}:{self.line}" if self.line else self.name


@dataclass(frozen=True)
class Source:
    """Places by dotted path; a path that was not written has the place of its nearest parent."""

    name: str
    places: Mapping[str, Place] = field(default_factory=dict)

    def place(self, path: str) -> Place:
        """Return the Place of a dotted path; the empty path is the whole recipe."""
        while path and path not in self.places:
            beside = path.replace(".args.", ".")  # an argument that is written beside ``use``
            path = beside if beside in self.places else path.rpartition(".")[0]
        return self.places.get(path, Place(self.name))

    @property
    def folder(self) -> Path:
        """The folder of the recipe; the current folder for a recipe made in Python."""
        return Path(self.name).absolute().parent

    def where(self, path: str) -> str:
        """Return the place of a dotted path as text: ``gpt.yaml:12``."""
        return str(self.place(path))


def require_unmasked(values: Mapping[str, object], path: str, source: Source) -> None:
    """Raise RecipeError if a value at or below ``path`` was masked when the recipe was written to a run folder."""
    rule = "is a secret, which a run folder does not keep"
    problems = [
        Problem(each, rule, remedy=f"give it again: --set {each}=..., or write it there", where=source.where(each))
        for each in masked_paths(values, path)
    ]
    if problems:
        raise RecipeError(problems)


def join_path(path: str, key: str) -> str:
    """Return the dotted path of a key in the section at ``path``."""
    return f"{path}.{key}" if path else key


def problem(source: Source, path: str, rule: str, got: str = "", remedy: str = "") -> RecipeError:
    """Return a RecipeError with one problem, for code that finds it later (such as a missing file)."""
    return RecipeError(Problem(path, rule, got=got, remedy=remedy, where=source.where(path)))
