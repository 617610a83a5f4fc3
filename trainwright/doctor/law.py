"""A law: what every correct training step obeys, whatever the model. A broken law is a finding, even without a name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding

Effort: TypeAlias = Literal["cheap", "replay"]
"""What a law needs: records and what listeners saw while the loop ran, or a step that is run again."""
State: TypeAlias = Literal["held", "broken", "not applicable", "not looked at"]
OF_LAWS = "law."
"""What the code of a broken law without a name begins with."""


@dataclass(frozen=True)
class Holds:
    """The law holds. ``checked`` says of what, in words: ``12 parameters over 40 steps``."""

    checked: str


@dataclass(frozen=True)
class NotApplicable:
    """The law says nothing about this run, or cannot be measured in it; ``why`` in words."""

    why: str


Verdict: TypeAlias = Holds | NotApplicable | Finding | ExperimentRequest
Judge: TypeAlias = Callable[[Case], Iterator[Verdict]]


@dataclass(frozen=True)
class Law:
    """``name`` is ``<family>.<law>``; its section of the family's ``laws.md`` has the title ``<law>``.

    ``judge`` is a pure function of a Case: it yields findings where the law is broken, else Holds or NotApplicable,
    and requests for experiments that would tell more; nothing where nothing was measured. A finding of it without a
    name of its own has the code ``law.<name>``. ``named_by`` are patterns (as of ``fnmatch``) of the codes of known
    causes: where such a finding is made as well, it takes in those of the law.
    """

    name: str
    judge: Judge
    effort: Effort = "cheap"
    named_by: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """The code of a break that has no name of its own."""
        return OF_LAWS + self.name


@dataclass(frozen=True)
class LawState:
    """What became of a law in a run, and why: what was compared, what was found, or why nothing could be."""

    name: str
    state: State
    why: str
