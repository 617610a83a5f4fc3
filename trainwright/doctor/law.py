"""The laws of families that are not converted yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from trainwright.doctor.case import Case
from trainwright.doctor.check import Compared as Holds
from trainwright.doctor.check import NotApplicable as NotApplicable
from trainwright.doctor.check import Result as Verdict

Effort: TypeAlias = Literal["cheap", "replay"]
OF_LAWS = "law."
Judge: TypeAlias = Callable[[Case], Iterator[Verdict]]
__all__ = ["OF_LAWS", "Effort", "Holds", "Judge", "Law", "NotApplicable", "Verdict"]


@dataclass(frozen=True)
class Law:
    """Until every family is converted."""

    name: str
    judge: Judge
    effort: Effort = "cheap"
    named_by: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        return OF_LAWS + self.name
