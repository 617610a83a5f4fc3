"""What the first rank does: it reads the rows and the status of every rank from the board, and compares them."""

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

JOIN_S, SILENT_S = 10.0, 15.0
"""How long it waits for ranks to join before it compares those that have; and how long a rank may say nothing."""
KEPT = 64
"""Rows of a rank that lie on the board, and steps whose rows may still come."""


class Gathering:
    """The ranks that take part, and what they have told. ``key`` is that of the meeting, ``names`` of its checksums."""

    def __init__(self, board: Board, key: str, names: Sequence[str]) -> None:
        self._board, self._key = board, key
        self._comparison = Comparison(board.size, names)
        self._present = [board.rank]
        self._waiting: deque[int] = deque(maxlen=KEPT)
        self._heard: dict[int, tuple[str, float]] = {}
        self._statuses: list[RankStatus] = []
        self._begin_s = time.monotonic()

    def wait_for(self, step: int) -> None:
        """The rows of ``step`` are to be compared as soon as all are there."""
        self._waiting.append(step)

    def facts(self, own: RankStatus, *, is_last: bool) -> RanksFacts:
        """What is known now. ``is_last``: this rank has ended, so nobody is waited for who has not joined."""
        self._welcome()
        while self._waiting and (rows := self._rows_of(self._waiting[0], is_last)) is not None:
            self._waiting.popleft()
            if len(rows) > 1:
                self._comparison.add(rows)
        self._statuses = self._read_statuses(own)
        return self._comparison.facts(self._present, self._statuses)

    def is_complete(self, step: int) -> bool:
        """Nothing more is to be waited for by a rank that ended after ``step``.

        All have ended; or one stands; or one is in a later step, and may be waiting for what this rank does next.
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
        """The rows of a step; None as long as one may still come, [] where one never will."""
        is_early = time.monotonic() - self._begin_s < JOIN_S and not is_last
        if len(self._present) < self._board.size and is_early:
            return None
        if any(status.ended and status.step < step for status in self._statuses):
            return []
        texts = self._board.read(*(f"{self._key}/row/{step}/{rank}" for rank in self._present))
        return None if texts is None else [construct(RankStep, json.loads(text)) for text in texts]

    def _read_statuses(self, own: RankStatus) -> list[RankStatus]:
        """The newest status of each rank that is present; how long it has been silent, where that is too long."""
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
            statuses.append(replace(status, silent_s=silent_s if silent_s > SILENT_S else 0.0))
        return sorted(statuses, key=lambda each: each.rank)


def as_text(value: RankStep | RankStatus | RanksFacts) -> str:
    """As strict JSON."""
    return json.dumps(strict(value), separators=(",", ":"), allow_nan=False)
