"""Findings as text: what, where, why, what to do, and the result of trying it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.runlog.records import Examined, Found, Record, Unexamined, Watched, Where

CRITICAL = 3
"""The exit code of a verb, or of a run that is otherwise well, with a critical finding."""


def exit_code(findings: Iterable[Found]) -> int:
    """CRITICAL where one of the findings is, else 0."""
    return CRITICAL if any(found.severity == "critical" for found in findings) else 0


_OF_LOOKS = {"casts", "batch", "again"}
"""Experiments of which each look runs one or more."""


@dataclass(frozen=True)
class LookedAt:
    """How many steps were recorded, and which of them were run again and looked at closely.

    ``unexamined`` is what found no time; None: the run does not say.
    """

    steps: int
    closely: tuple[int, ...]
    unexamined: Unexamined | None = None

    @classmethod
    def of(cls, records: Iterable[Record]) -> LookedAt:
        """By the records of a run; of a long one they are not of every step."""
        every = tuple(records)
        again = [each for each in every if isinstance(each, Examined) and each.experiment in _OF_LOOKS]
        closely = dict.fromkeys(each.step for each in again if "blind" not in each.values)
        unexamined = [each for each in every if isinstance(each, Unexamined)]
        steps = sum(isinstance(each, Watched) for each in every)
        return cls(steps, tuple(closely), unexamined[-1] if unexamined else None)

    def __str__(self) -> str:
        steps = f"{self.steps:,} recorded step{'' if self.steps == 1 else 's'}"
        return f"in {steps}, {len(self.closely) or 'none'} of them run again and looked at closely"


def lines_of(findings: Sequence[Found], run: Path | None, looked_at: LookedAt | None = None) -> list[str]:
    """The diagnosis for a person, the first cause first."""
    left = None if looked_at is None or looked_at.unexamined is None else line_of_unexamined(looked_at.unexamined, run)
    if not findings:
        return [f"diagnosis: nothing found {looked_at or ''}".rstrip(), *([left] if left else [])]
    lines = [f"diagnosis: {len(findings)} finding{'s' if len(findings) > 1 else ''}, the first cause first"]
    for number, found in enumerate(findings, 1):
        lines += _one(number, found)
    lines += [left] if left else []
    if run is not None:
        lines.append(f"more: trainwright explain {findings[0].code}; trainwright diagnose {run}")
    return lines


def line_of_unexamined(unexamined: Unexamined, run: Path | None) -> str | None:
    """What found no time, and how it is examined later; None where everything did. ``run`` None: it has no folder."""
    count = len(unexamined.experiments)
    if not count:
        return None
    later = (
        'tw.watch(..., examine="all") takes the time' if run is None else f"later: trainwright diagnose {run} --deep"
    )
    return (
        f"time: {count} examination{'' if count == 1 else 's'} found none: {unexamined.examined_s:.2g} s were spent on "
        f"others in {unexamined.trained_s:.2g} s of training; {later}"
    )


def _one(number: int, found: Found) -> Iterator[str]:
    where = place(found.where)
    since = f", since step {found.since_step}" if found.since_step not in (None, found.step) else ""
    yield f"{number}. {found.severity}: {found.code} (step {found.step}{since}; {found.sure:.0%} sure){where}"
    yield f"   {found.symptom}"
    yield f"   cause: {found.cause}"
    for each in found.evidence:
        expected = "" if each.expected is None else f" (expected {_value(each.expected)})"
        yield f"   seen: {each.measure} {_value(each.seen)}{expected}"
    yield f"   remedy: {found.remedy}"
    for tried in found.tried:
        yield f"   tried: {tried.remedy}: {tried.result}"
    for consequence in found.consequences:
        yield f"   follows: {consequence}"


def place(where: Where) -> str:
    """What a finding points at, as `` in module a.b at train.py:42``; "" where nothing is known."""
    names = ("module", "op", "dtype", "micro_batch", "rank")
    found = [(name, value) for name in names if (value := getattr(where, name)) is not None]
    parts = ["the model itself" if name == "module" and value == "" else f"{name} {value}" for name, value in found]
    if where.sample_ids:
        few = ", ".join(map(str, where.sample_ids[:8]))
        parts.append(f"samples {few}{', ...' if len(where.sample_ids) > 8 else ''}")
    at = f" at {where.source}" if where.source else ""
    return (f" in {', '.join(parts)}" if parts else "") + at


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
