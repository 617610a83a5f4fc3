"""Reads files of a run folder, which may be damaged or malicious.

Only regular files are opened, and the number of bytes read is limited. JSON is limited in depth and in the length of
its numbers. Except for STATE, it holds finite numbers and valid text only. All code that reads a run folder uses these
functions.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Iterator
from functools import cache
from io import BufferedReader
from json.decoder import JSONDecoder
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trainwright.errors import StorageError, text_of
from trainwright.runs.printing import readable
from trainwright.runs.system_calls import FOLLOW_LINKS_FLAGS
from trainwright.runs.system_calls import open_file as open_descriptor

MAX_LINE_BYTES = 2**24
"""The maximum line length of a log. A run writes at most about 100 KiB: statistics of a few thousand layers."""


class JsonLimits(NamedTuple):
    """Limits of a JSON file. ``plain``: its numbers are finite, and its text can be encoded."""

    num_bytes: int
    depth: int
    digits: int
    plain: bool = True


METADATA = JsonLimits(2**22, 100, 40)
BUNDLE = JsonLimits(2**26, 200, 40)
STATE = JsonLimits(2**28, 500, 4300, plain=False)
"""The state of a run holds whatever the user's objects put into it; Python itself writes at most 4300 digits."""


class UnreadableFile(StorageError):
    """A file of a run folder is missing, not a regular file, too large, or has invalid content."""

    def __init__(self, path: Path, reason: str, *, remedy: str = "restore the file from a copy, or remove it") -> None:
        super().__init__(f"{path} cannot be read: {reason}", remedy=remedy)
        self.path, self.reason = path, reason


def reason_of(error: Exception) -> str:
    """Return why a run cannot be read, in one printable line."""
    if isinstance(error, UnreadableFile):
        return f"{error.path.name}: {error.reason}"
    return readable(text_of(error, lines=1))[:300]


def open_file(path: Path, *, follow_links: bool = False) -> BufferedReader:
    """Open a regular file. Raises UnreadableFile for anything else, at once: a pipe would wait for its writer.

    A symbolic link is refused unless ``follow_links``: in a foreign run folder it may lead to any file of this machine,
    whose content a report would show.
    """
    try:
        fd = os.open(path, os.O_RDONLY | FOLLOW_LINKS_FLAGS) if follow_links else open_descriptor(path, os.O_RDONLY)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if not follow_links and path.is_symlink():
            raise UnreadableFile(path, "it is a symbolic link", remedy="replace it by a copy of the file") from error
        raise UnreadableFile(path, getattr(error, "strerror", None) or str(error), remedy=_remedy(error)) from error
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(fd, "rb")
    os.close(fd)
    what = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    raise UnreadableFile(path, f"it is {what.get(stat.S_IFMT(mode), 'not a regular file')}")


def read_text(path: Path, *, max_bytes: int = METADATA.num_bytes, follow_links: bool = False) -> str:
    """Read a UTF-8 text. Raises UnreadableFile."""
    with open_file(path, follow_links=follow_links) as file:
        content = _content(path, file, max_bytes)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableFile(path, f"it is not UTF-8 text (byte {error.start:,})") from None


def read_end_of_text(path: Path, max_bytes: int) -> str:
    """Read the last ``max_bytes`` of a text; bytes that are not UTF-8 are replaced. Raises UnreadableFile."""
    with open_file(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - max_bytes))
        return file.read(max_bytes).decode("utf-8", errors="replace")


def read_json(path: Path, limits: JsonLimits = METADATA, *, follow_links: bool = False) -> Any:
    """Read a JSON file. Raises UnreadableFile, also if it exceeds the ``limits``."""
    text = read_text(path, max_bytes=limits.num_bytes, follow_links=follow_links)
    try:
        return parse_json(text, limits)
    except ValueError as error:
        raise UnreadableFile(path, str(error)) from None


def parse_json(text: str, limits: JsonLimits = METADATA) -> Any:
    """Return the value of a JSON text. Raises ValueError, also if it exceeds the ``limits``."""
    try:
        value = _decoder(limits).decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if text.count("[") + text.count("{") > limits.depth and _is_deeper_than(value, limits.depth):
        raise ValueError(f"it is nested deeper than {limits.depth} levels")
    return _readable(value) if limits.plain and "\\u" in text else value


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines with their newlines. A line longer than MAX_LINE_BYTES is cut off, and no line follows it."""
    while line := file.readline(MAX_LINE_BYTES):
        yield line
        if is_too_long(line):
            return


def is_too_long(line: bytes) -> bool:
    """Return True if ``lines_of`` has cut this line off."""
    return len(line) >= MAX_LINE_BYTES and not line.endswith(b"\n")


def _content(path: Path, file: BinaryIO, max_bytes: int) -> bytes:
    size = os.fstat(file.fileno()).st_size  # large for a sparse file, too, which takes no space on the disk
    if size <= max_bytes:
        try:
            content = file.read(min(size + 2**16, max_bytes) + 1)  # the file may grow; read() allocates this size
        except OSError as error:
            raise UnreadableFile(path, error.strerror or str(error), remedy=_remedy(error)) from error
        if len(content) <= max_bytes:
            return content
    raise UnreadableFile(path, f"it has more than {max_bytes:,} bytes, too many for a file of a run")


def _remedy(error: Exception) -> str:
    if isinstance(error, PermissionError):
        return "let this user read it (chmod u+r), or become its owner"
    return "check the path and the disk"


@cache
def _decoder(limits: JsonLimits) -> JSONDecoder:
    def whole_number(text: str) -> int:
        if len(text) > limits.digits:
            raise ValueError(f"it holds a number of {len(text):,} digits")
        return int(text)

    if not limits.plain:
        return JSONDecoder(parse_int=whole_number)
    return JSONDecoder(parse_int=whole_number, parse_float=_finite, parse_constant=_finite)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"it holds the number {text[:20]}, which is not finite")
    return number


def _is_deeper_than(value: object, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [child for each in level for child in _children(each)]
        if not level:
            return False
    return True


def _children(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _readable(value: Any) -> Any:
    """Replace lone surrogates, which JSON can express and no encoding can write."""
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, list):
        return [_readable(each) for each in value]
    if isinstance(value, dict):
        return {readable(key): _readable(each) for key, each in value.items()}
    return value
