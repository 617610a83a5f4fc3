"""What rank 0 does: it reads what every rank has written to the shared board, and compares the ranks."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from trainwright.distributed.board import Board
from trainwright.doctor.facts.ranks import RanksFacts, RankStatus, RankStep
from trainwright.doctor.measure.ranks.compare import Comparison
from trainwright.runs.json_values import strict
from trainwright.runs.records import construct

JOIN_TIMEOUT_S = 10.0  # Time to wait for ranks to join. After it, the ranks that have joined are compared.
SILENT_TIMEOUT_S = 15.0  # Maximum time between two messages of a rank
MAX_PENDING_ROWS = 64  # Maximum number of rows of a rank on the board, and of steps that wait for missing rows


class Gathering:
    """The ranks that take part, and their reports.

    ``key`` is the prefix of all keys on the board, ``names`` are the names of the checksums.
    """

    def __init__(self, board: Board, key: str, names: Sequence[str]) -> None:
        self._board, self._key = board, key
        self._comparison = Comparison(board.size, names)
        self._present = [board.rank]
        self._waiting: deque[int] = deque(maxlen=MAX_PENDING_ROWS)
        self._heard: dict[int, tuple[str, float]] = {}
        self._statuses: list[RankStatus] = []
        self._begin_s = time.monotonic()

    def wait_for(self, step: int) -> None:
        """Schedules the comparison of ``step`` for when all rows are there."""
        self._waiting.append(step)

    def facts(self, own: RankStatus, *, is_last: bool) -> RanksFacts:
        """Returns the facts so far. ``is_last``: this rank has ended, so ranks that have not joined are not awaited."""
        self._welcome()
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

    def _welcome(self) -> None:
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
        """Returns the newest status of each present rank, and how long it has been silent, if too long."""
        others = [rank for rank in self._present if rank != own.rank]
        texts = self._board.read(*(f"{self._key}/status/{rank}" for rank in others)) if others else []
        now_s = time.monotonic()
        for rank, text in zip(others, texts or []):
            if self._heard.get(rank, ("", 0.0))[0] != text:
                self._heard[rank] = (text, now_s)
        statuses = [own]
        for text, heard_s in (self._heard[rank] for rank in others if rank in self._heard):
            silent_s = round(now_s - heard_s, 1)
            status = construct(RankStatus, json.loads(text))
            statuses.append(replace(status, silent_s=silent_s if silent_s > SILENT_TIMEOUT_S else 0.0))
        return sorted(statuses, key=lambda each: each.rank)


def as_text(value: RankStep | RankStatus | RanksFacts) -> str:
    """Returns a value as strict JSON."""
    return json.dumps(strict(value), separators=(",", ":"), allow_nan=False)
