"""How a run stands: one answer for the page, the list of runs, the diagnosis and ``--json``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trainwright.runs.lock import is_held
from trainwright.runs.records import Ended, Record, Started

RUNNING = "running"
KILLED = "killed"
UNKNOWN = "no end record"


def state_of(path: Path, records: Iterable[Record]) -> str:
    """finished, stopped, data_exhausted, failed, running, killed, or "no end record" where that is all that is known.

    ``records`` are those of the log of run folder ``path``, or at least its newest start and end. Without an end, the
    lock of the folder tells a run that goes on from one that was killed; a folder that was copied without its lock
    tells nothing.
    """
    newest = None
    for record in records:
        if isinstance(record, Started | Ended):
            newest = record
    if isinstance(newest, Ended):
        return newest.ending
    held = is_held(path)
    return UNKNOWN if held is None else RUNNING if held else KILLED
