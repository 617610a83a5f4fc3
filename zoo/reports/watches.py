"""The watches that a case can run under. Only this file of zoo.reports imports `tw.watch`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import trainwright as tw
from zoo.reports.case import Watch


@dataclass(frozen=True)
class Alarm:
    """The fields of a finding that are scored; of any severity. ``source`` is ``file:line``."""

    code: str
    severity: str
    step: int
    symptom: str
    cause: str
    module: str | None = None
    op: str | None = None
    rank: int | None = None
    source: str | None = None


class JudgedWatch(Watch, Protocol):
    """A watch that returns its findings."""

    def alarms(self) -> list[Alarm]: ...


class NullWatch:
    def __call__(self, model: Any, optimizer: Any, **options: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def alarms(self) -> list[Alarm]:
        return []


@dataclass
class TrainwrightWatch:
    """`tw.watch`; each call in the program gets a run folder of its own in ``folder``."""

    folder: Path

    def __post_init__(self) -> None:
        self._parts: list[tw.Watch] = []

    def __call__(self, model: Any, optimizer: Any, **options: Any) -> AbstractContextManager[Any]:
        part = tw.watch(model, optimizer, out=self.folder / f"part-{len(self._parts)}", quiet=True, **options)
        self._parts.append(part)
        return part

    def alarms(self) -> list[Alarm]:
        """Findings of all watches, one watch after another. Steps count on from the start of the first watch."""
        found: list[Alarm] = []
        done = 0
        for part in self._parts:
            found += [replace(_read(each), step=done + each.step) for each in part.findings()]
            done += part.step
        return found


def _read(finding: Any) -> Alarm:
    where = finding.where
    return Alarm(
        finding.code,
        finding.severity,
        finding.step,
        finding.symptom,
        finding.cause,
        where.module,
        where.op,
        where.rank,
        where.source,
    )


def merged(ranks: Sequence[Sequence[Alarm]]) -> list[Alarm]:
    """The findings of rank 0, then of rank 1 and so on; of each code only the first."""
    first: dict[str, Alarm] = {}
    for alarms in ranks:
        for alarm in alarms:
            first.setdefault(alarm.code, alarm)
    return list(first.values())
