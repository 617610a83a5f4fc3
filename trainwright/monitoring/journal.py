"""A log that tolerates write errors: a full disk costs records and a warning, not the run."""

from __future__ import annotations

from collections.abc import Callable

from trainwright.errors import StorageError
from trainwright.runs.records import Record
from trainwright.runs.writer import LogWriter


class Journal:
    """Writes records. Calls ``warn`` at the first failure, and at the end with the number of lost records."""

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
        try:
            self._writer.close()
        except StorageError as error:
            self._warn(f"{error.message}; its last lines may be lost ({error.remedy})")
