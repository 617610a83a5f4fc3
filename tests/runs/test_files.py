"""Files of a run folder are read within limits, and what is no regular file is refused at once."""

from __future__ import annotations

import json
import os
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from trainwright.runs.files import (
    BUNDLE,
    MAX_LINE_BYTES,
    METADATA,
    STATE,
    JsonLimits,
    UnreadableFile,
    open_file,
    parse_json,
    read_json,
    read_text,
)
from trainwright.runs.lock import is_locked
from trainwright.runs.reader import read, read_end, read_newest
from trainwright.runs.records import Ended, Saved, Started, from_json, to_json


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**42)


def sock(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = Path.cwd()
        os.chdir(path.parent)  # the path of a socket is short
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


NOT_REGULAR: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "socket": sock,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "nothing": lambda path: None,
    "sparse": sparse,
}


@pytest.mark.parametrize("make", NOT_REGULAR.values(), ids=NOT_REGULAR)
def test_what_is_no_file_of_a_run_is_refused_at_once(tmp_path: Path, make: Callable[[Path], object]) -> None:
    path = tmp_path / "plan.json"
    make(path)
    tracemalloc.start()
    with pytest.raises(UnreadableFile) as caught:
        read_json(path)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert str(path) in caught.value.message and caught.value.reason and caught.value.remedy


def test_a_pipe_in_the_place_of_the_lock_is_no_lock(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    assert not is_locked(tmp_path)


def test_links_are_followed_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("[1]")
    (tmp_path / "link").symlink_to("there")
    assert read_json(tmp_path / "link", follow_links=True) == [1]
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(UnreadableFile, match="device"):
        open_file(tmp_path / "zero", follow_links=True)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"\x80abc", "\ud800".encode("utf-8", "surrogatepass")])
def test_what_is_not_utf8_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UnreadableFile, match="UTF-8"):
        read_text(tmp_path / "x")


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[1] 2", "nan", "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 41, "9" * 5000),
        *("[" * 101 + "]" * 101, '{"a":' * 993 + "1" + "}" * 993, "[" * 100_000),
    ],
)
def test_what_breaks_a_limit_of_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="it ") as caught:
        parse_json(text)
    assert len(str(caught.value)) < 200


def test_the_depth_counts_levels_and_no_brackets() -> None:
    wide = json.dumps([[]] * 1000)
    assert parse_json(wide) == [[]] * 1000
    for limits in (METADATA, BUNDLE, STATE, JsonLimits(10, 3, 3)):
        just = "[" * limits.depth + "]" * limits.depth
        assert parse_json(just, limits)
        with pytest.raises(ValueError, match=f"deeper than {limits.depth}"):
            parse_json(f"[{just}]", limits)


def test_a_state_may_hold_what_python_can() -> None:
    state = {"big": 10**400, "nan": float("inf"), "text": "\ud800"}
    assert parse_json(json.dumps(state), STATE) == state


def test_lone_surrogates_are_escaped_and_pairs_are_not() -> None:
    value = parse_json('{"\\ud800": ["\\udfff", "\\ud83d\\ude00", "\\u00e4"]}')
    assert value == {"\\ud800": ["\\udfff", "\U0001f600", "\u00e4"]}


@pytest.mark.parametrize(
    ("was", "now"),
    [
        *(('"step":3', f'"step":{number}') for number in ("9" * 400, "1" + "0" * 19, "-" + "9" * 300, "1e400", "NaN")),
        *(('"time_s":7.0', f'"time_s":{number}') for number in ("9" * 400, "1e400", "Infinity")),
    ],
)
def test_a_record_with_a_number_out_of_range_is_none(was: str, now: str) -> None:
    line = to_json(Started(time_s=7.0, step=3, version="0", pid=1))
    assert from_json(line) and was in line
    with pytest.raises(ValueError, match=r"it holds|expected"):
        from_json(line.replace(was, now))


LOGS: dict[str, Callable[[Path], object]] = {
    "read": read,
    "read_newest": lambda path: read_newest(path, (Ended,)),
    "read_end": read_end,
}


@pytest.mark.parametrize("reading", LOGS.values(), ids=LOGS)
def test_a_log_that_is_no_file_is_refused(tmp_path: Path, reading: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(UnreadableFile, match="it is a pipe"):
        reading(tmp_path / "log.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("reading", LOGS.values(), ids=LOGS)
def test_a_line_without_an_end_is_not_kept(tmp_path: Path, reading: Callable[[Path], object]) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(to_json(Started(time_s=0.0, step=0, version="0", pid=1)) + "\n")
    with log.open("r+b") as file:
        file.truncate(2**42)
    tracemalloc.start()
    reading(log)
    assert tracemalloc.get_traced_memory()[1] < 5 * MAX_LINE_BYTES
    tracemalloc.stop()


def test_a_line_that_is_too_long_counts_as_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.runs.files.MAX_LINE_BYTES", 200)
    log, saved = tmp_path / "log.jsonl", Saved(time_s=0.0, step=1, path="x", bytes=1, seconds=0.0)
    log.write_text(f"{to_json(saved)}\n{'x' * 500}\n{to_json(saved)}\n")
    found = read(log)
    assert found.records == (saved,) and found.broken_lines == 1 and not found.torn
