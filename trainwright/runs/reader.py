"""Reads log.jsonl of a run that has ended or still runs; an incomplete last line is not an error."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, TypeVar

from trainwright.errors import UsageError
from trainwright.runs.files import is_too_long, lines_of, open_file
from trainwright.runs.lock import is_locked
from trainwright.runs.records import (
    KINDS,
    Ended,
    Evaluated,
    Found,
    Logged,
    Record,
    Skipped,
    Started,
    Step,
    Telemetry,
    Unknown,
    Watched,
    Withdrawn,
    from_json,
)

T = TypeVar("T")
JOULES_PER_KWH = 3.6e6
FIRST_RECORDS_KEPT, END_BYTES = 64, 256 * 2**10
MAX_LINES_KEPT = 8192
"""The number of lines that ``read_newest`` keeps: about 20 MB. More are kept if many records are not steps."""
MAX_LINES_OF_ANY_KIND = 2**17


@dataclass(frozen=True)
class LogContents:
    """The content of a log. ``broken_lines`` counts the lines that hold no record, except an incomplete last one.

    A line longer than ``files.MAX_LINE_BYTES`` is broken, and what follows it is not read. ``torn``: the last line was
    cut off (a kill, a full disk). ``unknown`` counts the records of kinds that only another version supports.
    """

    records: tuple[Record, ...]
    broken_lines: int
    torn: bool
    unknown: int = 0


def read(path: Path | str) -> LogContents:
    """Read every record. Raises UsageError when there is no such log."""
    with _open(Path(path)) as file:
        return decode_lines(lines_of(file))


def decode_lines(lines: Iterable[bytes]) -> LogContents:
    """Return the records of lines of a log, each with its newline."""
    records: list[Record] = []
    broken_lines, torn = 0, False
    for line in lines:
        record = _record(line)
        if record is not None:
            records.append(record)
        elif not line.endswith(b"\n") and not is_too_long(line):
            torn = True
        elif line.strip():  # a full disk may leave an empty line, which is no loss
            broken_lines += 1
    return LogContents(tuple(records), broken_lines, torn, sum(isinstance(each, Unknown) for each in records))


def read_newest(path: Path | str, kinds: tuple[type[Record], ...]) -> LogContents:
    """Read the records of these ``kinds`` that the newest process wrote, and its start. In long runs steps are thinned.

    For a log of any length, only about ``MAX_LINES_KEPT`` lines are held in memory: lines of other kinds are left out,
    steps are thinned while reading, and the remaining lines are decoded at the end. Lines without a record, or with an
    unknown one, are counted over all processes. Raises UsageError when there is no such log.
    """
    limit = MAX_LINES_KEPT
    wanted = tuple(_beginning(kind) for kind in (*kinds, Started))
    others = tuple(_beginning(kind) for kind in KINDS.values() if kind not in (*kinds, Started))
    lines: list[bytes] = []
    broken_lines = 0
    torn = False
    unknown = 0
    with _open(Path(path)) as file:
        for line in lines_of(file):
            if line.startswith(_beginning(Started)):
                lines, limit = [], MAX_LINES_KEPT
            if line.startswith(wanted):
                lines.append(line)
            elif not (line.startswith(others) and line.endswith(b"}\n")):
                odd = decode_lines([line])
                lines += [line] if any(isinstance(each, kinds) for each in odd.records) else []
                broken_lines = broken_lines + odd.broken_lines
                torn = odd.torn
                unknown = unknown + odd.unknown
            if len(lines) > limit:
                lines, limit = _thinned(lines, (_beginning(Watched),))
    found = decode_lines(lines)
    return LogContents(found.records, broken_lines + found.broken_lines, torn or found.torn, unknown)


def read_end(path: Path | str) -> tuple[Record, ...]:
    """Read the records in the last 256 KiB of a log. Raises UsageError when there is no such log."""
    with _open(Path(path)) as file:
        file.seek(0, os.SEEK_END)
        begin = max(0, file.tell() - END_BYTES)
        file.seek(begin)
        lines = file.readlines()
    return decode_lines(lines[1:] if begin else lines).records  # the first line may be cut off


def read_begin_s(path: Path | str) -> float | None:
    """Read the Unix time of the first start in the log; None if the beginning of the log holds none.

    File times do not show when the run started, because a resume or a copy writes the files again. Raises UsageError
    when there is no such log.
    """
    with _open(Path(path)) as file:
        first = decode_lines(file.read(END_BYTES).splitlines(keepends=True)[:100]).records
    return next((each.time_s for each in first if isinstance(each, Started) and each.time_s > 0), None)


@dataclass(frozen=True)
class Usage:
    """Seconds, and energy of the GPUs that measure it, summed over the processes of a run.

    A killed process is counted until its last record.
    """

    seconds: float = 0.0
    kwh: float = 0.0


UNUSED = Usage()


def read_usage(path: Path | str) -> Usage:
    """Read what all processes in a log have used. Raises UsageError when there is no such log."""
    usage = UNUSED
    begin_s, last, sensors = math.nan, b"", b""
    with _open(Path(path)) as file:
        for line in chain(lines_of(file), [b""]):
            if not line or line.startswith(_beginning(Started)):
                usage = _with_process(usage, begin_s, decode_lines([sensors, last]).records)
                begin_s = next((each.time_s for each in decode_lines([line]).records), math.nan)
                sensors = b""
            elif line.startswith(_beginning(Telemetry)):
                sensors = line
            last = line if line.endswith(b"}\n") else last
    return usage


def _with_process(usage: Usage, begin_s: float, records: Sequence[Record]) -> Usage:
    """Add a process with its last readings of sensors and its last record to ``usage``."""
    if math.isnan(begin_s) or not records:
        return usage
    kwh = usage.kwh
    for record in records:
        if isinstance(record, Telemetry):
            joules = sum(value for name, value in record.values.items() if name.endswith("/energy_joules"))
            kwh = max(kwh, usage.kwh + joules / JOULES_PER_KWH)
        elif isinstance(record, Ended):
            kwh = max(kwh, record.energy_kwh or 0.0)
    return Usage(usage.seconds + max(0.0, records[-1].time_s - begin_s), kwh)


def read_course(path: Path | str) -> tuple[Record, ...]:
    """Read the course of a run over all its processes, without telemetry and without the facts of the doctor.

    Steps that a resume went back over are left out. In long runs not every step is read. Raises UsageError when there
    is no such log.
    """
    kinds = tuple(map(_beginning, (Started, Ended, Evaluated, Found, Withdrawn, Logged, Skipped, Step, Watched)))
    of_steps = tuple(map(_beginning, (Step, Watched)))
    lines: list[bytes] = []
    limit = MAX_LINES_KEPT
    with _open(Path(path)) as file:
        for line in lines_of(file):
            if line.startswith(kinds):
                lines.append(line)
            if len(lines) > limit:
                lines, limit = _thinned(lines, of_steps)
    course: list[Record] = []
    for record in decode_lines(lines).records:
        if isinstance(record, Started):
            resumed_at = record.step
            course = [each for each in course if not isinstance(each, _STEP_RECORDS) or each.step <= resumed_at]
        course.append(record)
    return tuple(course)


_STEP_RECORDS = (Step, Watched, Evaluated, Logged)


def _beginning(kind: type[Record]) -> bytes:
    return f'{{"kind":"{kind.__name__.lower()}"'.encode()


def _thinned(lines: list[bytes], of_steps: tuple[bytes, ...]) -> tuple[list[bytes], int]:
    """Return fewer lines, and the number of lines at which to thin them again.

    This number grows with the lines that are not steps. Otherwise all of them would be examined again for each new
    line, in quadratic time.
    """
    lines = _without_half(lines, lambda each: each.startswith(of_steps))
    if len(lines) > MAX_LINES_OF_ANY_KIND:
        lines = lines[:FIRST_RECORDS_KEPT] + lines[-MAX_LINES_OF_ANY_KIND // 2 :]
    return lines, max(MAX_LINES_KEPT, len(lines) * 5 // 4)


def without_half_of_the_steps(records: list[Record]) -> list[Record]:
    """Return the records without every other step of their older half; the first 64 records stay."""
    return _without_half(records, lambda record: isinstance(record, Watched))


def _without_half(items: list[T], is_step: Callable[[T], bool]) -> list[T]:
    half = len(items) // 2
    return [
        each
        for index, each in enumerate(items)
        if index < FIRST_RECORDS_KEPT or index >= half or index % 2 or not is_step(each)
    ]


def _open(path: Path) -> BinaryIO:
    if path.is_dir() or not os.path.lexists(path):
        raise UsageError(f"{path} is not a log", remedy="give the log.jsonl of a run folder (runs/<name>/log.jsonl)")
    return open_file(path)


def _record(line: bytes) -> Record | None:
    try:
        return from_json(line.decode())
    except ValueError:
        return None


RUNNING = "running"
KILLED = "killed"
UNKNOWN = "no end record"


def state_of(path: Path, records: Iterable[Record]) -> str:
    """Return finished, stopped, data_exhausted, failed, running, killed, or "no end record" if nothing else is known.

    ``records`` are those of the log of run folder ``path``, or at least its newest start and end. Without an end
    record, the lock of the folder distinguishes a running process from a killed one. If a folder was copied without its
    lock, the state is unknown.
    """
    newest = None
    for record in records:
        if isinstance(record, Started | Ended):
            newest = record
    if isinstance(newest, Ended):
        return newest.ending
    held = is_locked(path)
    return UNKNOWN if held is None else RUNNING if held else KILLED
