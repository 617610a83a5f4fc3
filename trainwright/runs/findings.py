"""The findings of a run folder: one list for terminal, page, list of runs, diagnosis and ``--json``.

The log is the only source. A finding is written in full whenever it is new or its text changes, and withdrawn when it
no longer holds, so the latest record with a code is the finding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, get_args

from trainwright.runs.records import Found, Record, Started, Withdrawn, to_json

Severity = Literal["critical", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
Stage = Literal["input", "label", "forward", "loss", "backward", "clip", "update", "buffers", "loop"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""The parts of a step, in their order: a fault in an earlier part may cause faults in later ones."""


def rank(found: Found) -> tuple[int, bool, float, int]:
    """Return the sort key of findings, root causes first.

    By severity; then findings that name a cause before those that only name a symptom; then by confidence, in steps of
    a tenth; then by the part of the step.
    """
    return (
        _position(SEVERITIES, found.severity),
        not found.names_cause,
        -round(found.sure, 1),
        _position(STAGES, found.stage),
    )


def _position(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else len(names)


class FindingsFold:
    """Folds the records of a log, in their order, into the findings of the newest process that wrote it."""

    def __init__(self) -> None:
        self._by_code: dict[str, Found] = {}

    def take(self, record: Record) -> None:
        """Add the next record; kinds that do not concern findings are ignored."""
        if isinstance(record, Started):
            self._by_code.clear()
        elif isinstance(record, Found):
            self._by_code[record.code] = record
        elif isinstance(record, Withdrawn):
            self._by_code.pop(record.code, None)

    @property
    def findings(self) -> list[Found]:
        return sorted(self._by_code.values(), key=rank)


def findings_in(records: Iterable[Record]) -> list[Found]:
    """Return the findings in the records of a log, root causes first."""
    fold = FindingsFold()
    for record in records:
        fold.take(record)
    return fold.findings


class FindingsWriter(FindingsFold):
    """Holds the findings of a process and writes each change of them to its log."""

    def __init__(self, write: Callable[[Record], None]) -> None:
        super().__init__()
        self._write = write

    def get(self, code: str) -> Found | None:
        return self._by_code.get(code)

    def update(self, findings: Iterable[Found], step: int) -> None:
        """Replace all findings. ``step`` is the newest step, which is recorded when a finding is withdrawn."""
        before, self._by_code = self._by_code, {each.code: each for each in findings}
        for code in before.keys() - self._by_code.keys():
            self._write(Withdrawn(time_s=time.time(), code=code, step=step))
        for code, found in self._by_code.items():
            known = before.get(code)
            if known is None or to_json(known) != to_json(found):  # as text: NaN in evidence does not equal itself
                self._write(found)
