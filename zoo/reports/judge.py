"""Scores the alarms of one run, and adds up the scores of many.

An alarm is a warning or a critical finding. Alarms are in the doctor's order, the most likely cause first.

- A fault is *detected* if there is an alarm at or after its onset and none before.
- It is *in time* if none comes before its onset, and one at most 50 steps after the symptom shows.
- It is *named first* if the first alarm since the onset gives the right cause, *named* if one of the first three does.
- It is *placed* if the first alarm with the right cause also gives a right location.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from zoo.reports.case import Case, Outcome, Place, matches
from zoo.reports.watches import Alarm

IN_TIME_STEPS = 50
STEP_TOLERANCE = 1
"""Steps to spare: a finding's step may include the unfinished one."""


@dataclass(frozen=True)
class Verdict:
    """The score of one run under ``tw.watch``. Healthy programs and twins set only ``warnings`` and ``criticals``.

    ``early``: codes of alarms before the onset. ``placed`` is None if the case has no location. ``first_step``: step of
    the first alarm since the onset. ``due_step``: the last step at which it is in time, without the tolerance.
    """

    warnings: tuple[str, ...]
    criticals: tuple[str, ...]
    early: tuple[str, ...] = ()
    detected: bool = False
    in_time: bool = False
    named_first: bool = False
    named: bool = False
    placed: bool | None = None
    first_step: int | None = None
    due_step: int | None = None


@cache
def _parts(pattern: str) -> tuple[tuple[bool, re.Pattern[str]], ...]:
    parts = [part.strip() for part in pattern.split(" & ")]
    return tuple((not part.startswith("!"), re.compile(rf"\b(?:{part.removeprefix('!')})")) for part in parts)


def is_named(diagnosis: Sequence[str], alarm: Alarm) -> bool:
    """Return True if the code and cause of the alarm match a pattern, in lower case and without punctuation.

    A pattern consists of parts, joined by `` & ``. Each is a regular expression that matches from the start of a word,
    and has to be found; one that begins with ``!`` must not be found.
    """
    text = re.sub(r"[\W_]+", " ", f"{alarm.code} {alarm.cause}".lower()).strip()
    return any(all((part.search(text) is not None) is wanted for wanted, part in _parts(each)) for each in diagnosis)


def is_at(place: Place, alarm: Alarm, file: Path) -> bool:
    """Return True if the alarm names this place. A line outside of ``file``, the program, never matches."""
    name, _, line = (alarm.source or "").rpartition(":")
    text = linecache.getline(str(file), int(line)) if line.isdecimal() and Path(name).name == file.name else ""
    return (
        matches(place.module, alarm.module)
        and matches(place.op, alarm.op)
        and matches(place.line, text)
        and matches(place.rank, alarm.rank)
    )


def judge(case: Case, outcome: Outcome, found: Sequence[Alarm], *, faulty: bool) -> Verdict:
    warnings = tuple(alarm.code for alarm in found if alarm.severity == "warning")
    criticals = tuple(alarm.code for alarm in found if alarm.severity == "critical")
    if not faulty:
        return Verdict(warnings, criticals)
    alarms = [alarm for alarm in found if alarm.severity in ("warning", "critical")]
    early = [alarm for alarm in alarms if alarm.step < case.onset]
    alarms = [alarm for alarm in alarms if alarm.step >= case.onset]
    named = [is_named(case.diagnosis, alarm) for alarm in alarms]
    right = next((alarm for alarm, is_right in zip(alarms, named) if is_right), None)
    first = min((alarm.step for alarm in alarms), default=None)
    due = (case.shows if outcome.shows is None else outcome.shows) + IN_TIME_STEPS
    return Verdict(
        warnings,
        criticals,
        early=tuple(alarm.code for alarm in early),
        detected=bool(alarms) and not early,
        in_time=first is not None and not early and first <= due + STEP_TOLERANCE,
        named_first=any(named[:1]),
        named=any(named[:3]),
        placed=any(right is not None and is_at(place, right, case.file) for place in case.where)
        if case.where
        else None,
        first_step=first,
        due_step=due,
    )


@dataclass(frozen=True)
class Row:
    """One run of a case. ``error``: why it did not finish; then there is no outcome. NullWatch gives no verdict."""

    case: Case
    seed: int
    faulty: bool
    seconds: float
    outcome: Outcome | None = None
    verdict: Verdict | None = None
    alarms: tuple[Alarm, ...] = ()
    error: str | None = None

    @property
    def as_expected(self) -> bool:
        """The run finished with the symptom, or as a repaired twin without it and having learned."""
        if self.outcome is None:
            return False
        return self.outcome.symptom if self.faulty or not self.case.is_fault else self.outcome.is_healthy

    @property
    def name(self) -> str:
        return self.case.id + (" (repaired)" if self.case.is_fault and not self.faulty else "")

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.case.id,
            "half": self.case.half,
            "stage": self.case.stage,
            "seed": self.seed,
            "faulty": self.faulty,
            "seconds": round(self.seconds, 2),
            "as_expected": self.as_expected,
            "numbers": dict(self.outcome.numbers) if self.outcome else None,
            "verdict": asdict(self.verdict) if self.verdict else None,
            "alarms": [asdict(alarm) for alarm in self.alarms],
            "error": self.error,
        }


def totals(rows: Sequence[Row]) -> dict[str, Mapping[str, str]]:
    """A table of counts "hits/runs": faults by stage and all together; false alarms in twins and healthy programs."""
    table: dict[str, Mapping[str, str]] = {}
    faults = [row for row in rows if row.faulty and row.verdict]
    for stage in sorted({row.case.stage or "" for row in faults}):
        table[stage] = _rates([row.verdict for row in faults if row.case.stage == stage and row.verdict])
    if faults:
        table["all faults"] = _rates([row.verdict for row in faults if row.verdict])
    for title, is_fault in (("twins", True), ("healthy", False)):
        calm = [row.verdict for row in rows if not row.faulty and row.verdict and row.case.is_fault is is_fault]
        if calm:
            table[title] = {
                "with critical": f"{sum(bool(each.criticals) for each in calm)}/{len(calm)}",
                "with warning": f"{sum(bool(each.warnings) for each in calm)}/{len(calm)}",
            }
    return table


def _rates(verdicts: Sequence[Verdict]) -> dict[str, str]:
    placed = [verdict.placed for verdict in verdicts if verdict.placed is not None]
    counts = {
        "detected": sum(verdict.detected for verdict in verdicts),
        "in time": sum(verdict.in_time for verdict in verdicts),
        "named first": sum(verdict.named_first for verdict in verdicts),
        "named": sum(verdict.named for verdict in verdicts),
    }
    return {
        **{name: f"{count}/{len(verdicts)}" for name, count in counts.items()},
        "placed": f"{sum(placed)}/{len(placed)}",
    }
