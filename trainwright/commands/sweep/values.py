"""The values of a trial by step, read from its log while it runs."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from trainwright.commands.sweep.spec import TRAIN_LOSS, VALIDATION_LOSS
from trainwright.errors import UsageError
from trainwright.runs.files import open_file
from trainwright.runs.reader import decode_lines
from trainwright.runs.records import Evaluated, Record, Step

AVERAGED_RECORDS = 10
"""Number of records over which the training loss of a trial is averaged, because that of one batch is noisy."""


class ValueReader:
    """Reads the new records of a log at each call. A step that a resume repeats counts once."""

    def __init__(self, log: Path, metric: str) -> None:
        self._log = log
        self._metric = metric
        self._position = 0
        self._last_step = 0
        self._recent: deque[float] = deque(maxlen=AVERAGED_RECORDS)
        self.value: float | None = None

    def read(self) -> list[tuple[int, float]]:
        """Return new values by step. Raises UsageError for a metric that the run does not measure."""
        if not self._log.is_file():
            return []
        with open_file(self._log) as file:
            file.seek(self._position)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self._position += len(text)
        found = [self._of(each) for each in decode_lines(text.splitlines(keepends=True)).records]
        return [each for each in found if each is not None]

    def _of(self, record: Record) -> tuple[int, float] | None:
        if self._metric == TRAIN_LOSS:
            if not isinstance(record, Step) or record.step <= self._last_step:
                return None
            self._recent.append(record.loss)
            value = sum(self._recent) / len(self._recent)
        elif isinstance(record, Evaluated) and record.step > self._last_step:
            known = {VALIDATION_LOSS: record.loss, **record.metrics}
            if self._metric not in known:
                raise UsageError(
                    f"the validation has no metric {self._metric!r}", remedy=f"choose one of {', '.join(known)}"
                )
            value = known[self._metric]
        else:
            return None
        self._last_step, self.value = record.step, value
        return record.step, value
