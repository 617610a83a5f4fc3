"""Findings as text: what, where, why, what to do, and the result of trying it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from trainwright.runlog.records import Found, Where

CRITICAL = 3
"""The exit code of a verb, or of a run that is otherwise well, with a critical finding."""


def exit_code(findings: Iterable[Found]) -> int:
    """CRITICAL where one of the findings is, else 0."""
    return CRITICAL if any(found.severity == "critical" for found in findings) else 0


def lines_of(findings: Sequence[Found], run: Path | None = None) -> list[str]:
    """The findings for a person, the first cause first."""
    if not findings:
        return ["diagnosis: nothing found"]
    lines = [f"diagnosis: {len(findings)} finding{'s' if len(findings) > 1 else ''}, the first cause first"]
    for number, found in enumerate(findings, 1):
        lines += _one(number, found)
    if run is not None:
        lines.append(f"more: trainwright explain {findings[0].code}; trainwright diagnose {run}")
    return lines


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
