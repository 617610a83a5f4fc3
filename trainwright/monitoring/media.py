"""Writes the images, texts and histograms that a user logs to the run folder, the log and the sinks."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainwright.errors import StorageError
from trainwright.monitoring.sinks import Sink
from trainwright.runs.media import FOLDER, MAX_PIXELS, Image, Loggable, encode, file_of, shortened, type_of
from trainwright.runs.printing import printable
from trainwright.runs.records import Media, Record
from trainwright.runs.secrets import masked
from trainwright.runs.storage import make_subfolder, open_for_writing

MAX_NAME_CHARS = 200
MAX_NAMES = 200
MAX_FILES_PER_NAME = 1000
"""From this number of files on, every second value of a name is kept; from twice the number on, every fourth."""
MAX_RUN_BYTES = 2**30


class MediaWriter:
    """Writes values to ``media/`` of a run folder and to sinks, and the record of each by ``write``.

    A value that cannot be kept does not stop the run. ``warn`` receives each reason once, with a remedy.
    """

    def __init__(
        self, folder: Path, write: Callable[[Record], None], sinks: Sequence[Sink], warn: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._write = write
        self._sinks = sinks
        self._warn = warn
        self._warned: set[str] = set()
        self._calls = Counter[str]()
        self._files: dict[str, int] = {}
        self._bytes: int | None = None

    def write(self, step: int, values: Mapping[str, Loggable]) -> None:
        for name, value in values.items():
            self._write_one(step, name, value)

    def _write_one(self, step: int, name: str, value: Loggable) -> None:
        file = file_of(name, step, type_of(value))
        self._calls[name] += 1
        problem = self._problem(name, value, file)
        if not problem and (self._calls[name] - 1) % 2 ** (self._files[name] // MAX_FILES_PER_NAME):
            problem = f"{printable(name)}: after {MAX_FILES_PER_NAME:,} values only every second is kept, later fewer"
        if isinstance(value, str):
            value = str(masked(shortened(value)))
        if not problem:
            content = encode(value)
            problem = self._store(file, content)
        if problem:
            self._warn_once(problem)
            return
        self._bytes = (self._bytes or 0) + len(content)
        self._files[name] += 1
        caption = value.caption if isinstance(value, Image) else ""
        self._write(Media(time_s=time.time(), step=step, name=name, file=file, caption=str(masked(caption))))
        for sink in self._sinks:
            if isinstance(value, str):
                sink.text(step, name, value)
            else:
                sink.media(step, name, value)

    def _problem(self, name: str, value: Loggable, file: str) -> str:
        """Return why a value cannot be kept; "" if it can. The first call counts the files of an earlier process."""
        if self._bytes is None:
            self._bytes = sum(_sizes(self._folder / FOLDER))
        if len(name) > MAX_NAME_CHARS:
            return f"{printable(name[:40])}... is not kept: a name has at most {MAX_NAME_CHARS} characters"
        if name not in self._files and len(self._files) >= MAX_NAMES:
            return f"{printable(name)} is not kept: a run has at most {MAX_NAMES} names; log under the same name again"
        if isinstance(value, Image) and value.num_pixels > MAX_PIXELS:
            what = f"{printable(name)} is not kept: it has {value.num_pixels:,} pixels, at most {MAX_PIXELS:,} are kept"
            return f"{what}; reduce it first, for example image[..., ::2, ::2]"
        if self._bytes > MAX_RUN_BYTES:
            limit = f"the limit of {MAX_RUN_BYTES >> 20:,} MiB is reached"
            return f"further images and texts are not kept: {limit}; log them more rarely"
        if name not in self._files:
            self._files[name] = len(_sizes((self._folder / file).parent))
        return ""

    def _store(self, file: str, content: bytes) -> str:
        """Write a file. Return why it could not be written; "" if it was."""
        path = self._folder / file
        try:
            make_subfolder(path.parent.parent)
            make_subfolder(path.parent)
            with os.fdopen(open_for_writing(path, os.O_WRONLY | os.O_TRUNC), "wb") as opened:
                opened.write(content)
        except (OSError, StorageError) as error:
            return f"images and texts are not kept: {error}"
        return ""

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._warn(message)


def _sizes(folder: Path) -> list[int]:
    if folder.is_symlink():
        return []
    return [path.lstat().st_size for path in folder.rglob("*") if path.is_file()]
