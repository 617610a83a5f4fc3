"""Formats findings: symptom, place, cause, remedy, and the result of trying it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from trainwright.runs.records import Evidence, Found, Where

EXIT_CRITICAL = 3
"""The exit code of a command, or of an otherwise successful run, with a critical finding."""


def exit_code(findings: Iterable[Found]) -> int:
    """Return EXIT_CRITICAL if one of the findings is critical, else 0."""
    return EXIT_CRITICAL if any(found.severity == "critical" for found in findings) else 0


MAX_EVIDENCE_PRINTED = 3
"""The number of measurements printed for a finding; ``--json`` and the page show all."""


def lines_of(findings: Sequence[Found], run: Path | None = None, *, verbose: bool = False) -> list[str]:
    """Return the findings as text, root causes first, each in at most six lines.

    Args:
        findings: The findings to print.
        run: The run folder, for the last line.
        verbose: Print findings below a warning, too. Otherwise only their number is printed.
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
        yield f"   seen: {'; '.join(map(_format_evidence, found.evidence[:MAX_EVIDENCE_PRINTED]))}"
    yield f"   cause: {found.cause}"
    yield f"   fix: {found.remedy}"
    if found.tried:
        yield f"   tried: {'; '.join(f'{each.remedy}: {each.result}' for each in found.tried)}"


def _format_evidence(evidence: Evidence) -> str:
    expected = "" if evidence.expected is None else f" (expected {value_in_words(evidence.expected)})"
    return f"{evidence.measure} {value_in_words(evidence.seen)}{expected}"


def place(where: Where) -> str:
    """Return the place of a finding, such as `` in module a.b at train.py:42``; "" if unknown."""
    names = ("module", "op", "dtype", "micro_batch", "rank")
    found = [(name, value) for name in names if (value := getattr(where, name)) is not None]
    parts = ["the model itself" if name == "module" and value == "" else f"{name} {value}" for name, value in found]
    if where.sample_ids:
        few = ", ".join(map(str, where.sample_ids[:8]))
        parts.append(f"samples {few}{', ...' if len(where.sample_ids) > 8 else ''}")
    at = f" at {where.source}" if where.source else ""
    return (f" in {', '.join(parts)}" if parts else "") + at


def value_in_words(value: object) -> str:
    """Return a float with four digits, anything else as it is printed."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
