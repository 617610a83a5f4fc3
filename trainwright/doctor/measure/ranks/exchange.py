"""Sends reports of all ranks to rank 0 and the results of rank 0 to all ranks, in a background thread.

The exchange uses no collectives, and the training thread neither sends nor waits. A rank that is not watched, or that
has ended, does not delay the others.
"""

from __future__ import annotations

import faulthandler
import json
import socket
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from trainwright.distributed.board import Board, open_board
from trainwright.distributed.ras import ras_problems, ras_report, uses_nccl
from trainwright.distributed.threads import small_stacks
from trainwright.doctor.context import RunContext
from trainwright.doctor.diagnose import diagnose
from trainwright.doctor.facts.ranks import (
    CollectiveFacts,
    NonfiniteFacts,
    RanksFacts,
    RankStatus,
    RankStep,
    WeightsChange,
)
from trainwright.doctor.measure.ranks.compare import Comparison
from trainwright.doctor.measure.ranks.flight_recorder import recorded
from trainwright.recorder.ranks import num_collectives
from trainwright.runs import records
from trainwright.runs.json_values import strict
from trainwright.runs.records import Found, Record, construct

TICK_S = 0.05  # Interval at which the thread reads the board
TICK_RANK_S = 0.002  # Added to TICK_S for each rank
CLOSE_TIMEOUT_S = 3.0  # Time that a finished rank waits for reports of the others
FAILED_TIMEOUT_S = 1.0  # The same for a failed rank. The others may have failed, too
RECORDS_PATIENCE = 1.2  # Time to wait for the reports of all ranks on a stall, as a multiple of patience_s
ENDED_TIMEOUT_S = 5.0  # A rank without progress for this time is stalled if another rank has ended


@dataclass(frozen=True)
class Meeting:
    """Properties of a watched loop. Two ranks are compared only if ``signature`` and ``collectives`` are equal.

    Attributes:
        names: Names of the checksums. The names of rank 0 are used.
        signature: The shapes of the model.
        collectives: Number of collectives that had been started before the watch.
    """

    names: tuple[str, ...]
    signature: str = ""
    collectives: int = 0


@dataclass(frozen=True)
class Site:
    """The folder for the stack traces of a stalled rank (None: not written), and a callback for a stalled loop."""

    folder: Path | None
    alarm: Callable[[RanksFacts], None]

    def leave_stack(self, rank: int, thread: int) -> str:
        """Writes the stack traces of all threads of this process. Returns the current line of ``thread``."""
        if self.folder is not None:
            with suppress(OSError), (self.folder / f"stack-rank-{rank}.txt").open("w") as file:
                faulthandler.dump_traceback(file)  # if writing fails, the line is still returned
        frame = sys._current_frames().get(thread)
        here = traceback.extract_stack(frame)[-1] if frame is not None else None
        return f"{Path(here.filename).name}:{here.lineno} ({here.name})" if here else ""


class Exchange:
    """The exchange of one rank. ``name`` and ``number`` must be equal on all ranks for the same watch.

    The training thread calls ``at`` and ``post``, which return immediately. Raises RuntimeError if the ranks have no
    common store.
    """

    def __init__(self, name: str, meeting: Meeting, site: Site, *, number: int, patience_s: float) -> None:
        board = open_board(name)
        self._board, self._meeting, self._site, self._number = board, meeting, site, number
        self._patience_s, self._num_collectives = patience_s, num_collectives
        self.rank, self.size = board.rank, board.size
        self.facts: RanksFacts | None = None
        self._key: str | None = None
        self._rows: deque[RankStep] = deque(maxlen=MAX_PENDING_ROWS)
        self._posted: deque[str] = deque()
        self._place, self._progress_s = (0, "begin"), time.monotonic()  # written by the training thread
        self._status = RankStatus(rank=board.rank, host=socket.gethostname())  # written by the training thread
        self._is_stalled, self._where = False, ""  # written by the exchange thread
        self._recorded: tuple[CollectiveFacts, ...] = ()
        self._nccl: tuple[str, ...] = ()
        self._urgent = self._alarmed = False
        self._version = 0
        self._gathering: Gathering | None = None  # on rank 0
        self._thread_id = threading.get_ident()
        self._wake, self._closing = threading.Event(), threading.Event()
        with small_stacks():
            self._thread = threading.Thread(target=self._run, name="trainwright-ranks", daemon=True)
            self._thread.start()

    @property
    def step(self) -> int:
        """Number of updates of this rank."""
        return self._place[0]

    # called by the training thread

    def at(self, step: int, phase: str) -> None:
        """Records that the loop has completed ``step`` updates and begins ``phase``. Takes less than 1 us."""
        self._place, self._progress_s = (step, phase), time.monotonic()

    def post(self, row: RankStep) -> None:
        """Queues the report of a step for the exchange thread."""
        self._rows.append(row)
        self._wake.set()

    def report_nonfinite(self, found: NonfiniteFacts) -> None:
        """Reports the first step of this rank that is not finite."""
        if self._status.nonfinite is None:
            self._report(replace(self._status, nonfinite=found))

    def report_changes(self, found: Sequence[WeightsChange]) -> None:
        """Reports weights that changed without an update. The first four are kept."""
        self._report(replace(self._status, changes=(*self._status.changes, *found)[:4]))

    def _report(self, status: RankStatus) -> None:
        self._status, self._urgent = status, True
        self._wake.set()

    def close(self, ended: str, unused: tuple[str, ...] = (), *, wait: bool = True) -> None:
        """Reports the end of the loop. If ``wait``, waits for reports of the others for a limited time."""
        self._report(replace(self._status, ended=ended, unused=unused, collectives=self._num_collectives()))
        self._progress_s = time.monotonic()
        self._closing.set()
        self._wake.set()
        if wait:
            self._thread.join(CLOSE_TIMEOUT_S + 2 * self._tick_s)

    # the exchange thread

    @property
    def _tick_s(self) -> float:
        return TICK_S + TICK_RANK_S * self.size

    def _run(self) -> None:
        with suppress(RuntimeError, ValueError):  # the store is gone, and with it rank 0
            while not self._is_over():
                self._wake.wait(self._tick_s)
                self._wake.clear()
                self._update()
            if self.rank == 0:
                self._board.post("meeting", json.dumps({"number": -1}))

    def _is_over(self) -> bool:
        """Returns True if this rank has ended and no more reports are pending."""
        if not self._closing.is_set():
            return False
        if time.monotonic() - self._progress_s > (
            CLOSE_TIMEOUT_S if self._status.ended == "finished" else FAILED_TIMEOUT_S
        ):
            return True
        return not self._rows and not self._urgent and (self._key is None or self._needs_no_more_reports())

    def _needs_no_more_reports(self) -> bool:
        """Returns True if all ranks have ended, or if rank 0 is in a later step and may be waiting for this rank."""
        if self._gathering is not None:
            return self._gathering.is_complete(self.step)
        found = self._board.read(f"{self._key}/status/0")
        first = construct(RankStatus, json.loads(found[0])) if found else RankStatus(rank=0)
        have_ended = self.facts is not None and all(each.ended for each in self.facts.statuses)
        return have_ended or (first.begun > self.step and not first.ended)

    def _update(self) -> None:
        if self._key is None:
            self._open_or_join()
        self._check_progress()
        if self._key is None:
            return
        self._send()
        if self._gathering is not None:
            self._compare(self._gathering)
        while self._gathering is None and (found := self._board.read(f"{self._key}/facts/{self._version + 1}")):
            self._version += 1
            self.facts = construct(RanksFacts, json.loads(found[0]))
        facts = self.facts
        if facts is None or self._alarmed or self._closing.is_set() or not self._is_stalled:
            return
        are_known = all(each.stalled or each.silent_s or each.ended for each in facts.statuses)
        if not are_known and time.monotonic() - self._progress_s < RECORDS_PATIENCE * self._patience_s:
            return
        if any(each.stalled or each.silent_s for each in facts.statuses):
            self._alarmed = True  # the stalled loop cannot read the facts
            self._site.alarm(facts)

    def _open_or_join(self) -> None:
        """Opens the exchange on rank 0. Another rank joins it if number and properties are equal."""
        properties = {"number": self._number, "signature": self._meeting.signature, "begun": self._meeting.collectives}
        if self.rank == 0:
            self._key = uuid.uuid4().hex[:12]
            self._board.post("meeting", json.dumps({**properties, "key": self._key}))
            self._gathering = Gathering(self._board, self._key, self._meeting.names)
            return
        found = self._board.read("meeting")
        theirs = json.loads(found[0]) if found else {}
        if all(theirs.get(name) == value for name, value in properties.items()):
            self._key = theirs["key"]
            self._board.post(f"{self._key}/status/{self.rank}", as_text(self._now()))
            self._board.post(f"{self._key}/joined/{self.rank}", "")

    def _send(self) -> None:
        while self._rows:
            row = self._rows.popleft()
            key = f"{self._key}/row/{row.step}/{self.rank}"
            self._board.post(key, as_text(row))
            self._posted.append(key)
            if self._gathering is not None:
                self._gathering.wait_for(row.step)
            if len(self._posted) > MAX_PENDING_ROWS:
                self._board.drop(self._posted.popleft())
        self._urgent = False
        self._board.post(f"{self._key}/status/{self.rank}", as_text(self._now()))

    def _now(self) -> RankStatus:
        """Returns the current status. A rank whose ``still_s`` no longer changes has lost this thread."""
        step, phase = self._place
        status = replace(self._status, step=step, phase=phase, stalled=self._is_stalled, where=self._where)
        status = replace(status, recorded=self._recorded, nccl=self._nccl)
        if status.ended:
            return replace(status, stalled=False)
        still_s = round(time.monotonic() - self._progress_s, 3)
        return replace(status, still_s=still_s, collectives=self._num_collectives())

    def _check_progress(self) -> None:
        """Detects a stalled rank, and writes its stack trace into the run folder."""
        others_ended = self.facts is not None and any(each.ended for each in self.facts.statuses)
        patience_s = min(ENDED_TIMEOUT_S, self._patience_s) if others_ended else self._patience_s
        is_stalled = time.monotonic() - self._progress_s > patience_s and not self._status.ended
        if is_stalled != self._is_stalled:
            self._where = self._site.leave_stack(self.rank, self._thread_id) if is_stalled else ""
            self._recorded = recorded() if is_stalled else ()
            reads_ras = is_stalled and self.rank == 0 and uses_nccl()  # one process can report on all processes
            self._nccl = ras_problems(ras_report()) if reads_ras else ()
            self._is_stalled, self._urgent = is_stalled, True

    def _compare(self, gathering: Gathering) -> None:
        """Publishes the facts if they have changed. Only on rank 0."""
        before, facts = self.facts, gathering.facts(self._now(), is_last=bool(self._status.ended))
        self.facts = facts
        if len(facts.present) > 1 and (before is None or _news_of(before) != _news_of(facts)):
            self._version += 1
            self._board.post(f"{self._key}/facts/{self._version}", as_text(facts))


def _news_of(facts: RanksFacts) -> object:
    """Returns the part of the facts whose changes are published: everything but elapsed times."""
    statuses = [
        (s.stalled, s.ended, s.unused, s.where, s.nonfinite is None, len(s.changes), s.silent_s > 0)
        for s in facts.statuses
    ]
    return facts.present, facts.compared, statuses


JOIN_TIMEOUT_S = 10.0  # Time to wait for ranks to join. After it, the ranks that have joined are compared.
SILENT_TIMEOUT_S = 15.0  # Maximum time between two messages of a rank
MAX_PENDING_ROWS = 64  # Maximum number of rows of a rank on the board, and of steps that wait for missing rows


class Gathering:
    """The ranks that take part, and their reports. ``key`` is the prefix of all keys on the board."""

    def __init__(self, board: Board, key: str, names: Sequence[str]) -> None:
        self._board, self._key = board, key
        self._comparison = Comparison(board.size, names)
        self._present = [board.rank]
        self._waiting: deque[int] = deque(maxlen=MAX_PENDING_ROWS)
        self._last_messages: dict[int, tuple[str, float]] = {}
        self._statuses: list[RankStatus] = []
        self._begin_s = time.monotonic()

    def wait_for(self, step: int) -> None:
        """Schedules the comparison of ``step`` for when all rows are there."""
        self._waiting.append(step)

    def facts(self, own: RankStatus, *, is_last: bool) -> RanksFacts:
        """Returns the facts so far. ``is_last``: this rank has ended, so ranks that have not joined are not awaited."""
        self._add_joined()
        while self._waiting and (rows := self._rows_of(self._waiting[0], is_last)) is not None:
            self._waiting.popleft()
            if len(rows) > 1:
                self._comparison.add(rows)
        self._statuses = self._read_statuses(own)
        return self._comparison.facts(self._present, self._statuses)

    def is_complete(self, step: int) -> bool:
        """Returns True if a rank that ended after ``step`` has nothing to wait for.

        This is so if all have ended, if one is stalled, or if one is in a later step and may be waiting for this rank.
        """
        running = [each for each in self._statuses if not each.ended]
        if len(self._present) < 2 or any(each.stalled or each.begun > step for each in running):
            return True
        return not running and not self._waiting

    def _add_joined(self) -> None:
        absent = [rank for rank in range(self._board.size) if rank not in self._present]
        self._present += [rank for rank in absent if self._board.read(f"{self._key}/joined/{rank}") is not None]
        self._present.sort()

    def _rows_of(self, step: int, is_last: bool) -> list[RankStep] | None:
        """Returns the rows of a step; None while one is pending, [] if one will never arrive."""
        is_early = time.monotonic() - self._begin_s < JOIN_TIMEOUT_S and not is_last
        if len(self._present) < self._board.size and is_early:
            return None
        if any(status.ended and status.step < step for status in self._statuses):
            return []
        texts = self._board.read(*(f"{self._key}/row/{step}/{rank}" for rank in self._present))
        return None if texts is None else [construct(RankStep, json.loads(text)) for text in texts]

    def _read_statuses(self, own: RankStatus) -> list[RankStatus]:
        """Returns the newest status of each present rank, with ``silent_s`` if it has been silent for too long."""
        others = [rank for rank in self._present if rank != own.rank]
        texts = self._board.read(*(f"{self._key}/status/{rank}" for rank in others)) if others else []
        now_s = time.monotonic()
        for rank, text in zip(others, texts or []):
            if self._last_messages.get(rank, ("", 0.0))[0] != text:
                self._last_messages[rank] = (text, now_s)
        statuses = [own]
        for text, received_s in (self._last_messages[rank] for rank in others if rank in self._last_messages):
            silent_s = round(now_s - received_s, 1)
            status = construct(RankStatus, json.loads(text))
            statuses.append(replace(status, silent_s=silent_s if silent_s > SILENT_TIMEOUT_S else 0.0))
        return sorted(statuses, key=lambda each: each.rank)


def as_text(value: RankStep | RankStatus | RanksFacts) -> str:
    """Returns a value as strict JSON."""
    return json.dumps(strict(value), separators=(",", ":"), allow_nan=False)


def record_of(facts: RanksFacts, step: int) -> records.Examined:
    """Returns the facts as a record of the log."""
    values = strict(vars(facts))
    return records.Examined(time_s=time.time(), step=step, experiment=RanksFacts.experiment, values=values)


def findings_of(facts: RanksFacts) -> list[Found]:
    """Returns the findings of these facts alone."""
    return [each.found for each in diagnose(RunContext([record_of(facts, facts.newest)])).findings]


def raise_alarm(facts: RanksFacts, write: Callable[[Record], None], print_line: Callable[[str], None]) -> None:
    """Writes the facts and the findings, and prints the findings."""
    write(record_of(facts, facts.newest))
    for found in findings_of(facts):
        write(replace(found, time_s=time.time()))
        print_line(f"{found.code}: {found.symptom}")
