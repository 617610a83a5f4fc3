"""The log after a kill, on a full disk, and in a folder that disappears."""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from tests.disks import small_disk
from tests.report_pages.runs import step
from trainwright.errors import StorageError
from trainwright.runs.reader import read
from trainwright.runs.records import Saved, Step
from trainwright.runs.writer import LogWriter


def saved(step: int, path: str = "checkpoints/x") -> Saved:
    return Saved(time_s=0.0, step=step, path=path, bytes=1, seconds=0.0)


def test_appends_across_openings(tmp_path: Path) -> None:
    for number in (1, 2):
        writer = LogWriter(tmp_path / "log.jsonl")
        writer.write(saved(number))
        assert read(tmp_path / "log.jsonl").records[-1] == saved(number), "it is on disk when write returns"
        writer.close()
        writer.close()
    assert read(tmp_path / "log.jsonl").records == (saved(1), saved(2))


def test_a_torn_last_line_is_closed_before_the_next_record(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    writer = LogWriter(log)
    writer.write(saved(1))
    writer.write(saved(2))
    writer.close()
    os.truncate(log, log.stat().st_size - 5)
    before = read(log)
    assert (before.records, before.broken_lines, before.torn) == ((saved(1),), 0, True)
    writer = LogWriter(log)
    writer.write(saved(3))
    writer.close()
    after = read(log)
    assert (after.records, after.broken_lines, after.torn) == ((saved(1), saved(3)), 1, False)


def test_a_last_line_that_only_lacks_its_newline_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    writer = LogWriter(log)
    writer.write(saved(1))
    writer.close()
    os.truncate(log, log.stat().st_size - 1)
    writer = LogWriter(log)
    writer.write(saved(2))
    writer.close()
    after = read(log)
    assert (after.records, after.broken_lines) == ((saved(1), saved(2)), 0)


def write_forever(log: Path, returned: int) -> None:
    """Write steps, and to the pipe ``returned`` the number of each step that was written."""
    writer = LogWriter(log)
    for number in count(1):
        writer.write(replace(step(number, math.nan if number % 3 else 1.0), ids_hash="x" * (number * 977 % 20_000)))
        os.write(returned, number.to_bytes(8, "little"))


def kill_while_writing(log: Path, after_s: float) -> int:
    """Kill a process while it writes. Return the number of steps that it has written."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        write_forever(log, writing)
    os.close(writing)
    written = os.read(reading, 8)  # it is writing now
    deadline_s = time.monotonic() + after_s
    while time.monotonic() < deadline_s:
        written = os.read(reading, 2**16)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while rest := os.read(reading, 2**16):
        written = rest
    os.close(reading)
    return int.from_bytes(written[-8:], "little")


@pytest.mark.process
def test_a_kill_at_any_instant_costs_at_most_the_line_being_written(tmp_path: Path) -> None:
    instants = random.Random(0)
    for attempt in range(10):
        log = tmp_path / f"log-{attempt}.jsonl"
        returned = kill_while_writing(log, instants.uniform(0.0, 0.05))
        contents = read(log)
        numbers = [record.step for record in contents.records if isinstance(record, Step)]
        assert numbers == list(range(1, len(contents.records) + 1))
        assert contents.broken_lines == 0
        assert returned <= len(numbers) <= returned + 1
        writer = LogWriter(log)  # and the run can be taken up again
        writer.write(saved(1))
        writer.close()
        assert read(log).records[-1] == saved(1)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 64 KiB."""
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        yield disk


def test_a_disk_that_fills_up_loses_only_what_does_not_fit(tiny_disk: Path) -> None:
    writer = LogWriter(tiny_disk / "log.jsonl")
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(b"0" * 4096)
    written = 0
    with pytest.raises(StorageError, match=r"the disk is full(.|\n)*free space"):
        for step in range(1, 1000):
            writer.write(saved(step, path="p" * 1000))
            written = step
    full = read(tiny_disk / "log.jsonl")
    assert [record.step for record in full.records if isinstance(record, Saved)] == list(range(1, written + 1))
    assert full.torn
    ballast.unlink()
    writer.write(saved(5000))
    writer.close()
    after = read(tiny_disk / "log.jsonl")
    assert (after.records[:-1], after.records[-1], after.broken_lines) == (full.records, saved(5000), 1)


def test_a_deleted_folder_is_noticed_and_not_written_into_nowhere(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    writer = LogWriter(tmp_path / "run" / "log.jsonl")
    writer.write(saved(1))
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(StorageError, match="was deleted while the run was writing"):
        writer.write(saved(2))
    writer.close()


def test_a_renamed_folder_keeps_its_log(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    writer = LogWriter(tmp_path / "run" / "log.jsonl")
    (tmp_path / "run").rename(tmp_path / "renamed")
    writer.write(saved(1))
    writer.close()
    assert read(tmp_path / "renamed" / "log.jsonl").records == (saved(1),)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="does not exist"):
        LogWriter(tmp_path / "gone" / "log.jsonl")


def test_a_close_that_fails_says_so_once(tmp_path: Path) -> None:
    """As on a network mount that writes only now, or with a quota that is used up."""
    writer = LogWriter(tmp_path / "log.jsonl")
    os.close(writer._fd)
    with pytest.raises(StorageError, match=r"cannot close .*log\.jsonl") as caught:
        writer.close()
    assert caught.value.remedy
    writer.close()
