"""Where each value of a recipe was written: ``file:line``, ``--set path`` or an environment variable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

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
        """Returns the Place of a dotted path; the empty path is the whole recipe."""
        while path and path not in self.places:
            path = path.rpartition(".")[0]
        return self.places.get(path, Place(self.name))

    @property
    def folder(self) -> Path:
        """The folder that the recipe lies in; the current one for a recipe that was made in Python."""
        return Path(self.name).absolute().parent

    def where(self, path: str) -> str:
        """Returns the place of a dotted path as text: ``gpt.yaml:12``."""
        return str(self.place(path))


class Places(Protocol):
    """Gives the place of a dotted path as text."""

    def where(self, path: str, /) -> str: ...


def require_unmasked(values: Mapping[str, object], path: str, source: Places) -> None:
    """Raises RecipeError where a value at or below ``path`` was masked when the recipe was written to a run folder."""
    rule = "is a secret, which a run folder does not keep"
    problems = [
        Problem(each, rule, remedy=f"give it again: --set {each}=..., or write it there", where=source.where(each))
        for each in masked_paths(values, path)
    ]
    if problems:
        raise RecipeError(problems)


def joined(path: str, key: str) -> str:
    """Returns the dotted path of a key in the section at ``path``."""
    return f"{path}.{key}" if path else key


def problem(source: Source, path: str, rule: str, got: str = "", remedy: str = "") -> RecipeError:
    """Returns a RecipeError with one problem, for rooms that find it only later (a file that is missing, say)."""
    return RecipeError(Problem(path, rule, got=got, remedy=remedy, where=source.where(path)))
