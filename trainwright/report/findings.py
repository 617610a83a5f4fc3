"""Findings as text: what, where, why, what to do, and the result of trying it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from trainwright.runs.records import Evidence, Found, Where

CRITICAL = 3
"""The exit code of a verb, or of a run that is otherwise well, with a critical finding."""


def exit_code(findings: Iterable[Found]) -> int:
    """CRITICAL where one of the findings is, else 0."""
    return CRITICAL if any(found.severity == "critical" for found in findings) else 0


MOST_EVIDENCE = 3
"""Measurements that the lines of a finding show; ``--json`` and the page have all."""


def lines_of(findings: Sequence[Found], run: Path | None = None, *, verbose: bool = False) -> list[str]:
    """The findings for a person, the first cause first, each in at most six lines.

    Args:
        findings: Those to print.
        run: The run folder, for the last line.
        verbose: Print findings below a warning, too. Else their number is printed.
    """
    shown = [each for each in findings if verbose or each.severity != "info"]
    lines = ["diagnosis: nothing found"]
    if shown:
        lines = [f"diagnosis: {len(shown)} finding{'s' if len(shown) > 1 else ''}, the first cause first"]
    for number, found in enumerate(shown, 1):
        lines += _one(number, found)
    if hidden := len(findings) - len(shown):
        where = f": trainwright diagnose {run} -v" if run is not None else ", which -v prints"
        lines.append(f"{hidden} note{'s' if hidden > 1 else ''} below a warning{where}")
    if run is not None and shown:
        lines.append(f"more: trainwright explain {shown[0].code}; trainwright diagnose {run}")
    return lines


def _one(number: int, found: Found) -> Iterator[str]:
    since = f", since step {found.since_step}" if found.since_step not in (None, found.step) else ""
    yield f"{number}. {found.severity}: {found.code}{place(found.where)} (step {found.step}{since})"
    also = ", ".join(each.partition(":")[0] for each in found.consequences)
    yield f"   {found.symptom}" + (f"; explains {also}" if also else "")
    if found.evidence:
        yield f"   seen: {'; '.join(map(_measured, found.evidence[:MOST_EVIDENCE]))}"
    yield f"   cause: {found.cause}"
    yield f"   fix: {found.remedy}"
    if found.tried:
        yield f"   tried: {'; '.join(f'{each.remedy}: {each.result}' for each in found.tried)}"


def _measured(evidence: Evidence) -> str:
    expected = "" if evidence.expected is None else f" (expected {_value(evidence.expected)})"
    return f"{evidence.measure} {_value(evidence.seen)}{expected}"


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
