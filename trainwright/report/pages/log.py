"""Reads the log of a run incrementally, in bounded memory however long it is."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from trainwright.report.pages.layers import LayerMaps, OutputGradMaps
from trainwright.report.pages.media import LoggedMedia
from trainwright.report.pages.rows import (
    COLUMNS,
    MachineReading,
    Readings,
    Rows,
    SpanMeans,
    as_json,
    by_step,
    column,
    no_rows,
    thin_rows,
)
from trainwright.report.verdict import divided_by
from trainwright.runs.files import MAX_LINE_BYTES, UnreadableFile, is_too_long, open_file
from trainwright.runs.findings import FindingsFold
from trainwright.runs.json_values import JsonValue, plain
from trainwright.runs.reader import decode_lines
from trainwright.runs.records import (
    Ended,
    Evaluated,
    Found,
    Logged,
    Media,
    NotSaved,
    OutOfMemory,
    Quarantined,
    Record,
    Replayed,
    Saved,
    Skipped,
    Started,
    Step,
    Telemetry,
    Unexamined,
    Watched,
    Withdrawn,
)

CHUNK_BYTES = 2**20
BUCKETS = 800
"""The number of spans kept once there are more than MAX_ROWS rows."""
MAX_ROWS, MAX_NOTES = 16_000, 2000
LONG_BYTES = 16 * 2**20
"""A larger log may need several calls to be read. Until it was read completely, the page shows samples of it."""
SAMPLES, SAMPLE_BYTES = 64, 2**16
"""The number of parts of a long log that are read ahead, and their size."""
KEPT_RECORDS = (
    *(Started, Ended, Evaluated, NotSaved, OutOfMemory, Quarantined, Replayed, Saved, Skipped, Logged),
    Unexamined,
)
"""Records that are kept unchanged, the newest MAX_NOTES of each kind. Steps become rows, telemetry becomes readings,
findings are folded; others are ignored.
"""

_NUMBER, _LAST_NUMBER = rb"([^,]+)", rb"([^,}]+)"
"""A class that excludes only one byte matches twice as fast. The quotes of non-finite numbers are removed later."""
_STEP = re.compile(
    rb'\n\{"kind":"step","time_s":%b,"step":%b,"loss":%b,"grad_norm":%b,"lr":%b,"weight":[^,]+,"samples":%b,'
    rb'"tokens":%b,"step_s":%b,"wait_s":%b,"skipped":%b,"mem_bytes":%b' % (*(_NUMBER,) * 10, _LAST_NUMBER)
)
_WATCHED = re.compile(
    rb'\n\{"kind":"watched","time_s":%b,"step":%b,"loss":%b,"grad_norm":%b,"lr":%b,'
    rb'(?:[^\n]*"step_s":%b,"wait_s":%b)?' % (*(_NUMBER,) * 6, _LAST_NUMBER)
)
_STEP_COLUMNS = tuple(COLUMNS.index(name) for name in COLUMNS[1:])
_WATCHED_COLUMNS = tuple(
    COLUMNS.index(name) for name in ("time_s", "step", "loss", "grad_norm", "lr", "step_s", "wait_s")
)
_TIME_COLUMNS = tuple(COLUMNS.index(name) for name in ("step_s", "wait_s"))
"""In a run of the Trainwright engine these come from the step records, as means over all steps; records of examined
steps are timed differently.
"""
_KINDS = b"|".join(kind.__name__.lower().encode() for kind in (*KEPT_RECORDS, Media, Telemetry, Found, Withdrawn))
_KEPT_LINE = re.compile(rb'\n(\{"kind":"(?:%b)"[^\n]*)' % _KINDS)
_ACCUMULATION = re.compile(rb'\n(\{"kind":"examined"[^\n]*"experiment":"accumulation"[^\n]*)')
_LAYERS = re.compile(rb'\n(\{"kind":"layers"[^\n]*)')
_OUTPUT_GRADS = re.compile(rb'\n(\{"kind":"outputgrads"[^\n]*)')
_STEP_BEGINNING = b'\n{"kind":"step"'
_STARTED = re.compile(rb'\n\{"kind":"started"')
"""All patterns begin with a newline: searching for it is several times as fast as for the beginning of a line."""


class IncrementalLog:
    """The part of a log read so far: its steps as rows, thinned, and the records of other kinds that a page shows.

    ``advance`` reads on. While a long log is being read, ``rows`` also have samples of its unread part, so that they
    span the run at once, and an end of the run in its last lines is known. A log that was replaced or truncated is read
    again from its start, under another ``name``.
    Steps that a resume went back over are dropped. ``sessions`` are the times (Unix) of
    the first and last record of each process; ``newest_process`` is the newest Started or Ended record.

    ``means`` are over all steps, ``readings`` are those of the machine, ``layers`` the statistics by layer,
    ``output_grads`` the gradients of outputs by module, ``figures`` the metrics and the user's logged values,
    ``media`` the user's images, texts and histograms.
    ``findings`` are those of the newest process, each in its latest wording. ``is_examined``: the doctor recorded
    steps, or found something. ``unreadable`` is the reason why the log cannot be read, or "".
    Losses that a watched loop divides by the number of micro-batches are multiplied by it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin()

    def _begin(self) -> None:
        self.name = secrets.token_hex(4)
        self._rows, self._ahead, self.read_rows = no_rows(), no_rows(), 0
        self._sessions: list[tuple[float, float]] = []
        self.counts = Counter[type[Record]]()
        self._notes: dict[type[Record], deque[Record]] = {kind: deque(maxlen=MAX_NOTES) for kind in KEPT_RECORDS}
        self._newest_process: Started | Ended | None = None
        self._end_ahead: Ended | None = None
        self._findings, self.is_examined = FindingsFold(), False
        self.means = SpanMeans()
        self.readings = Readings()
        self.layers = LayerMaps()
        self.figures = Figures()
        self.media = LoggedMedia()
        self.output_grads = OutputGradMaps()
        self._is_ours = False
        self._divided_by = 1
        self._offset = 0
        self._file_id = (0, 0)
        self._is_complete = True
        self.unreadable = ""

    def notes(self, *kinds: type[Record]) -> list[Record]:
        return [record for kind in kinds for record in self._notes[kind]]

    @property
    def rows(self) -> Rows:
        """The steps that were read and, until all were read, samples of the others."""
        return np.concatenate([self._rows, self._ahead]) if len(self._ahead) else self._rows

    @property
    def sessions(self) -> list[tuple[float, float]]:
        """The times of the first and last record of each process, in Unix time."""
        if not len(self._ahead) or not self._sessions:
            return self._sessions
        *others, (begin_s, end_s) = self._sessions
        return [*others, (begin_s, max(end_s, float(column(self._ahead, "time_s").max())))]

    @property
    def newest_process(self) -> Started | Ended | None:
        """The newest record of a start or end of a process; None before the first."""
        return self._end_ahead or self._newest_process

    @property
    def findings(self) -> list[Found]:
        return self._findings.findings

    @property
    def heat_maps(self) -> list[JsonValue]:
        layers = self.layers.to_json()
        return [*([layers] if layers else []), *self.output_grads.to_json()]

    @property
    def losses(self) -> list[tuple[int, float]]:
        """Training losses by step; for a thinned log, means over spans. Infinite: not finite."""
        if self.is_thinned:
            means = self.means.columns()
            steps, losses = means["step"], means["loss"]
        else:
            steps, losses = column(self.rows, "step"), column(self.rows, "loss")
        known = ~np.isnan(losses)
        return list(dict(zip(steps[known].astype(int).tolist(), losses[known].tolist())).items())  # last record of each

    @property
    def position(self) -> tuple[str, int]:
        """A value that changes whenever something was read."""
        return self.name, self._offset

    @property
    def is_thinned(self) -> bool:
        """True if ``rows`` do not contain every step of the log."""
        return self.read_rows > MAX_ROWS or len(self._ahead) > 0

    @property
    def is_complete(self) -> bool:
        """True if the last read left nothing but an incomplete line."""
        return self._is_complete

    def advance(self, *, for_s: float = float("inf")) -> bool:
        """Read new records for about ``for_s`` seconds. Return True if there were any."""
        until_s = time.perf_counter() + for_s
        self._is_complete, before = True, self.position
        try:
            file = open_file(self.path)
        except UnreadableFile as error:
            self.unreadable = error.reason if os.path.lexists(self.path) else ""  # does not exist yet, or no longer
            return False
        with file:
            seen = os.fstat(file.fileno())
            if (seen.st_dev, seen.st_ino) != self._file_id or seen.st_size < self._offset:
                self._begin()
                self._file_id = (seen.st_dev, seen.st_ino)
            if self._offset == 0 and for_s < math.inf and seen.st_size > LONG_BYTES:
                self._look_ahead(file, seen.st_size)
            file.seek(self._offset)
            while chunk := file.read(CHUNK_BYTES):
                rest = b"" if chunk.endswith(b"\n") else file.readline(MAX_LINE_BYTES)
                chunk += rest
                if is_too_long(rest):
                    self.unreadable = f"it has a line of more than {MAX_LINE_BYTES:,} bytes"
                    self._offset = seen.st_size
                    break
                complete = chunk[: chunk.rfind(b"\n") + 1]  # an incomplete last line is read again when it is complete
                self._take(complete)
                self._offset += len(complete)
                if len(complete) < len(chunk):
                    break
                if time.perf_counter() >= until_s:
                    self._is_complete = file.read(1) == b""
                    break
        read_to = column(self._rows, "step")[-1:].max(initial=-1)
        self._ahead = no_rows() if self._is_complete else self._ahead[column(self._ahead, "step") > read_to]
        self._end_ahead = None if self._is_complete else self._end_ahead
        return before != self.position

    def _look_ahead(self, file: BinaryIO, size: int) -> None:
        """Read samples of a long log, and the end of the newest process if it is in the last lines."""
        parts = []
        for offset in np.linspace(0, size - SAMPLE_BYTES, SAMPLES).astype(int).tolist():
            file.seek(offset)
            part = file.read(SAMPLE_BYTES)
            parts.append(part[part.find(b"\n") : part.rfind(b"\n") + 1])
        text = b"".join(parts)
        self._ahead = by_step(_drop_invalid(np.concatenate([_rows_of(text, Step), _rows_of(text, Watched)])))
        column(self._ahead, "order")[:] = np.inf
        for record in decode_lines(_KEPT_LINE.findall(parts[-1])).records:
            if isinstance(record, Started | Ended):
                self._end_ahead = record if isinstance(record, Ended) else None

    def _take(self, lines: bytes) -> None:
        """Process complete lines; a Started record begins a new part, because it may go back over steps."""
        text = b"\n" + lines
        others = _without_steps(text)
        if not _STARTED.search(others):
            self._take_part(text, others)
            return
        cuts = [found.start() for found in _STARTED.finditer(text)]
        for begin, end in zip([0, *cuts], [*cuts, len(text)]):
            part = text[begin:end]
            self._take_part(part, _without_steps(part))

    def _take_part(self, lines: bytes, others: bytes) -> None:
        """Process lines, each preceded by a newline. ``others`` are those that are not step records, usually few."""
        for record in decode_lines(_KEPT_LINE.findall(others)).records:
            self._add_record(record)
        for line in _LAYERS.findall(others):
            self.layers.take(line)
        for line in _OUTPUT_GRADS.findall(others):
            self.output_grads.take(line)
        self.figures.take_lines(lines)
        for record in decode_lines(_ACCUMULATION.findall(others)).records:
            self._multiply_losses(divided_by(record))
        steps, watched = _rows_of(lines, Step), _rows_of(others, Watched)
        self._is_ours = self._is_ours or len(steps) > 0
        self.is_examined = self.is_examined or len(watched) > 0
        column(watched, "loss")[:] *= self._divided_by
        if self._is_ours:
            watched[:, _TIME_COLUMNS] = np.nan
        fresh = _drop_invalid(np.concatenate([steps, watched]))
        if not len(fresh):
            return
        times = column(fresh, "time_s")
        begin_s, end_s = self._sessions.pop() if self._sessions else (float(times.min()), 0.0)
        self._sessions.append((begin_s, max(end_s, float(times.max()))))
        column(fresh, "order")[:] = np.arange(self.read_rows + 1, self.read_rows + 1 + len(fresh))
        self.read_rows += len(fresh)
        self.means.take(fresh)
        self._rows = by_step(np.concatenate([self._rows, fresh]))
        if len(self._rows) > MAX_ROWS:
            self._rows = thin_rows(self._rows, BUCKETS)

    def _multiply_losses(self, divided_by: int) -> None:
        """Multiply the losses of a watched loop by the number that it divides them by; 0: unknown."""
        if not divided_by or divided_by == self._divided_by:
            return
        factor = divided_by / self._divided_by
        self._divided_by = divided_by
        column(self._rows, "loss")[:] *= factor
        column(self._ahead, "loss")[:] *= factor
        self.means.multiply("loss", factor)
        self.name = secrets.token_hex(4)  # what a page has read before is not valid any more

    def _add_record(self, record: Record) -> None:
        self.counts[type(record)] += 1
        self._findings.take(record)
        self.is_examined = self.is_examined or isinstance(record, Found)
        if isinstance(record, Started | Ended):
            self._newest_process = record
        if isinstance(record, Started):
            self._go_back_to(record.step)
            self._sessions.append((record.time_s, record.time_s))
        elif self._sessions and (isinstance(record, Ended) or not isinstance(self._newest_process, Ended)):
            begin_s, end_s = self._sessions.pop()  # ``diagnose --deep`` adds records after the end
            self._sessions.append((begin_s, max(end_s, record.time_s)))
        if isinstance(record, Telemetry):
            self.readings.add(MachineReading(record.time_s, record.step, record.values))
        elif isinstance(record, Media):
            self.media.take(record)
        elif isinstance(record, KEPT_RECORDS):
            if isinstance(record, Evaluated | Logged):
                self.figures.take(record)
            self._notes[type(record)].append(record)

    def _go_back_to(self, step: int) -> None:
        self._rows = self._rows[column(self._rows, "step") <= step]
        self.means.go_back_to(step, self._rows)
        self.readings.go_back_to(step)
        self.figures.go_back_to(step)
        self.media.go_back_to(step)
        self.layers.go_back_to(step)
        self.output_grads.go_back_to(step)
        evaluations = self._notes[Evaluated]
        kept = [each for each in evaluations if isinstance(each, Evaluated) and each.step <= step]
        evaluations.clear()
        evaluations.extend(kept)


def _without_steps(text: bytes) -> bytes:
    """Return the lines of ``text`` that are not step records. Each line is preceded by its newline."""
    codes = np.frombuffer(text, np.uint8)
    newlines = np.flatnonzero(codes == ord("\n"))
    ends = np.append(newlines[1:], len(text))
    is_other = ends - newlines < len(_STEP_BEGINNING)
    for offset, code in enumerate(_STEP_BEGINNING):
        is_other |= codes[np.minimum(newlines + offset, len(text) - 1)] != code
    return b"".join(text[begin:end] for begin, end in zip(newlines[is_other].tolist(), ends[is_other].tolist()))


def _drop_invalid(rows: Rows) -> Rows:
    """Drop rows whose step or time no run writes and no chart can show."""
    steps, times = column(rows, "step"), column(rows, "time_s")
    return rows[(steps >= 0) & (steps < 2**53) & (np.abs(times) < 1e15)]


def _rows_of(lines: bytes, kind: type[Step] | type[Watched]) -> Rows:
    """Return the rows of all records of a kind. Records of another version in another order are decoded one by one."""
    pattern, columns = (_STEP, _STEP_COLUMNS) if kind is Step else (_WATCHED, _WATCHED_COLUMNS)
    found: Sequence[Sequence[bytes]] = pattern.findall(lines)
    beginning = b'\n{"kind":"%b"' % kind.__name__.lower().encode()
    if len(found) < lines.count(beginning):
        numbers = np.array(list(_one_by_one(lines, beginning)), dtype=np.float64).reshape(-1, len(columns))
        rows = np.full((len(numbers), len(COLUMNS)), np.nan)
        rows[:, columns] = numbers
        return rows
    rows = np.full((len(found), len(COLUMNS)), np.nan)
    for index, texts in zip(columns, zip(*found)):
        rows[:, index] = _numbers(texts)
    return rows


def _numbers(texts: Sequence[bytes]) -> NDArray[np.float64]:
    """Return the numbers of one column of a chunk. Fast for constant columns, such as the memory."""
    if texts[0] == texts[-1] == texts[len(texts) // 2] and texts.count(texts[0]) == len(texts):
        return np.full(len(texts), _number(texts[0]))
    try:
        numbers = np.fromiter(map(float, texts), np.float64, len(texts))
    except ValueError:
        return np.array(list(map(_number, texts)))
    return np.where(np.isfinite(numbers), numbers, np.inf)


def _number(text: bytes) -> float:
    """Return NaN for a missing value, infinity for one that is not finite."""
    try:
        number = float(text.strip(b'"'))
    except ValueError:  # null, or a value that another version wrote
        return np.nan
    return number if abs(number) < np.inf else np.inf


def _one_by_one(lines: bytes, beginning: bytes) -> Iterator[list[float]]:
    for record in decode_lines(line for line in lines.split(b"\n") if line.startswith(beginning[1:])).records:
        if isinstance(record, Step):
            values = [getattr(record, name) for name in COLUMNS[1:]]
        elif isinstance(record, Watched):
            values = [record.time_s, record.step, record.loss, record.grad_norm, record.lr]
            values += [record.values.get(name) for name in ("step_s", "wait_s")]
        else:
            continue
        yield [_number(b"" if each is None else str(each).encode()) for each in values]


_PROBED = re.compile(rb'\n\{"kind":"step","time_s":([^,]+),"step":(\d+)[^\n]*?"probed":(\{"[^\n]+?\}),"fractions"')
_SETS = ("train", "training", "val", "valid", "validation", "test", "eval", "evaluation")
_PREFIXED = re.compile(rf"({'|'.join(_SETS)})[_/.](.+)")
TRAIN, VALIDATION, LOGGED = "train", "validation", ""
"""Where a figure comes from: metrics of training batches, metrics of a validation, or values that the user logged."""


class Figures:
    """The metrics and logged values of the log read so far, in bounded memory."""

    def __init__(self) -> None:
        self._readings = {TRAIN: Readings(), VALIDATION: Readings(), LOGGED: Readings()}
        self._names_of_sets: set[str] = set()

    def take_lines(self, lines: bytes) -> None:
        """Add the step records in these lines, each of which begins with a newline."""
        if b'"probed":{"' not in lines:
            return
        for time_s, step, values in _PROBED.findall(lines):
            self._take(TRAIN, float(time_s), int(step), json.loads(values))

    def take(self, record: Evaluated | Logged) -> None:
        if isinstance(record, Logged):
            self._take(LOGGED, record.time_s, record.step, record.figures)
            return
        self._names_of_sets |= {name.removesuffix(".loss") for name in record.metrics if name.endswith(".loss")}
        if record.metrics:
            self._take(VALIDATION, record.time_s, record.step, record.metrics)

    def _take(self, on: str, time_s: float, step: int, values: Mapping[str, object]) -> None:
        numbers = {name: plain(value) for name, value in values.items()}
        floats = {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}
        # on a page, infinity stands for "not finite" and NaN for "missing"
        known = {name: value if math.isfinite(value) else math.inf for name, value in floats.items()}
        self._readings[on].add(MachineReading(time_s, step, known))

    def go_back_to(self, step: int) -> None:
        for each in self._readings.values():
            each.go_back_to(step)

    def _columns(self) -> Iterator[tuple[str, str, NDArray[np.float64], NDArray[np.float64]]]:
        """Yield the set and the name of each figure, its steps and its values."""
        for on, readings in self._readings.items():
            columns = readings.columns()
            for name in sorted(columns.keys() - {"time_s", "step"}):
                yield on, name, columns["step"], columns[name]

    def series(self) -> Iterator[tuple[str, tuple[NDArray[np.float64], NDArray[np.float64]]]]:
        """Yield the name of each figure with its set, such as ``validation.accuracy``, its steps and its values."""
        for on, name, steps, values in self._columns():
            yield (f"{on}.{name}" if on else name), (steps, values)

    def to_json(self) -> list[JsonValue]:
        """Return one chart for each figure, with a series for each set it was measured on, training first."""
        charts: dict[str, dict[str, JsonValue]] = {}
        for on, name, steps, values in self._columns():
            chart, label = self._chart_of(name, on)
            known = ~np.isnan(values)
            series = as_json({"step": steps[known], "value": values[known]})
            is_evaluation = on == VALIDATION or (on == LOGGED and label in _SETS[2:])
            charts.setdefault(chart, {})[label] = {**series, "label": label, "is_evaluation": is_evaluation}
        return [
            {"name": chart, "series": list(series.values())}
            for chart, series in sorted(charts.items())
            if chart != "loss" or len(series) > 1  # a single loss is in the main chart already
        ]

    def _chart_of(self, name: str, on: str) -> tuple[str, str]:
        """Return the chart of a figure, and the name of its curve there."""
        head, _, rest = name.partition(".")
        if rest and head in self._names_of_sets:
            return rest, head
        if on == LOGGED and (found := _PREFIXED.fullmatch(name)):
            return found[2], found[1]
        return name, on or name
