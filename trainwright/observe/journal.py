"""The log as training sees it: a full disk costs log lines and a warning, never the run."""

from __future__ import annotations

from collections.abc import Callable

from trainwright.errors import StorageError
from trainwright.runlog.records import Record
from trainwright.runlog.writer import LogWriter


class Journal:
    """Writes records; the first failure is told by ``warn``, and how many lines were lost at the end."""

    def __init__(self, writer: LogWriter, warn: Callable[[str], None]) -> None:
        self._writer, self._warn = writer, warn
        self.lost = 0

    def write(self, record: Record) -> None:
        try:
            self._writer.write(record)
        except StorageError as error:
            self.lost += 1
            if self.lost == 1:
                self._warn(f"{error.message}; training goes on, but its log has a gap ({error.remedy})")

    def close(self) -> None:
        if self.lost:
            self._warn(f"{self.lost} lines of {self._writer.path} were lost")
        self._writer.close()
