"""The state of a run: one answer for the page, the list of runs, the diagnosis and ``--json``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trainwright.runs.lock import is_locked
from trainwright.runs.records import Ended, Record, Started

RUNNING = "running"
KILLED = "killed"
UNKNOWN = "no end record"


def state_of(path: Path, records: Iterable[Record]) -> str:
    """Return finished, stopped, data_exhausted, failed, running, killed, or "no end record" if nothing else is known.

    ``records`` are those of the log of run folder ``path``, or at least its newest start and end. Without an end, the
    lock of the folder distinguishes a run that continues from one that was killed. A folder that was copied without its
    lock has neither.
    """
    newest = None
    for record in records:
        if isinstance(record, Started | Ended):
            newest = record
    if isinstance(newest, Ended):
        return newest.ending
    held = is_locked(path)
    return UNKNOWN if held is None else RUNNING if held else KILLED
