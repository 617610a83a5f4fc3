"""Appends records to log.jsonl; a kill at any time loses at most the line that is being written."""

from __future__ import annotations

import os
from pathlib import Path

from trainwright.runs.records import Record, to_json
from trainwright.runs.storage import deleted_error, open_for_writing, storage_error
from trainwright.runs.system_calls import read_at


class LogWriter:
    """An append-only log: one ``os.write`` for each record, nothing is buffered in this process.

    A record survives a kill of the process once ``write`` has returned, but not a power failure.
    Raises StorageError when the disk is full, or the folder is gone or may not be written.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            self._fd = open_for_writing(self.path, os.O_RDWR | os.O_APPEND)
            # A kill in the middle of a line leaves it without a newline; the next record must begin a new line.
            self._line_is_open = _last_byte(self._fd) not in (b"", b"\n")
        except OSError as error:
            raise storage_error(error, self.path, "open") from error

    def write(self, record: Record) -> None:
        """Append one line. After a StorageError the writer stays usable: space may be freed."""
        line = to_json(record).encode("ascii") + b"\n"
        if self._line_is_open:
            line = b"\n" + line
        try:
            # A deleted file accepts writes without an error and loses them: one fstat (about 1 us) detects that.
            if os.fstat(self._fd).st_nlink == 0:
                raise deleted_error(self.path)
            written = os.write(self._fd, line)
            while written < len(line):  # a disk that fills up accepts a part first and fails on the next call
                self._line_is_open = True
                written += os.write(self._fd, line[written:])
        except OSError as error:
            raise storage_error(error, self.path, "write") from error
        self._line_is_open = False

    def close(self) -> None:
        """Close the file; a second call does nothing. Raises StorageError: a network mount may write only now."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            os.close(fd)
        except OSError as error:
            raise storage_error(error, self.path, "close") from error


def _last_byte(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    return read_at(fd, 1, size - 1) if size else b""
