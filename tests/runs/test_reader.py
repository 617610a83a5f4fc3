"""Reading logs of dead, living and resumed runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.report_pages.runs import add, ended, started, step
from trainwright.errors import UsageError
from trainwright.runs import reader
from trainwright.runs.folder import RunFolder
from trainwright.runs.reader import MAX_LINES_KEPT, read, read_course, read_newest
from trainwright.runs.records import Ended, Evaluated, Examined, Record, Step, Unknown, Watched, to_json


def test_broken_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    good = [to_json(step(1)).encode(), to_json(step(2)).encode()]
    garbage = [b"\0" * 4096, b"\xff\xfe", b"[" * 100_000, b'{"kind":"step"}', good[0][:50], b""]
    log.write_bytes(b"\n".join([good[0], *garbage, good[1], good[1][:20]]))
    contents = read(log)
    assert contents.records == (step(1), step(2))
    assert (contents.broken_lines, contents.torn) == (len(garbage) - 1, True)  # an empty line lost nothing


def test_unknown_kinds_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"kind":"hologram","time_s":4.5,"colour":"red"}\n')
    assert read(log).records == (Unknown(kind="hologram", time_s=4.5, fields={"colour": "red"}),)


def test_no_log_and_a_folder_are_usage_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "log.jsonl", tmp_path, tmp_path / "a" / "b"):
        with pytest.raises(UsageError, match="is not a log"):
            read(path)


def test_an_empty_log_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").touch()
    assert read(tmp_path / "log.jsonl").records == ()


def test_the_course_has_the_last_record_of_each_step_and_no_past_that_was_given_up(tmp_path: Path) -> None:
    add(RunFolder(tmp_path), [started(0), *(step(n, 1.0) for n in (1, 2, 3, 4)), started(2), step(3, 9.0)])
    course = [each for each in read_course(tmp_path / "log.jsonl") if isinstance(each, Step)]
    assert [(each.step, each.loss) for each in course] == [(1, 1.0), (2, 1.0), (3, 9.0)]


def watched(number: int) -> Watched:
    return Watched(time_s=0.0, step=number, loss=1.0, grad_norm=1.0, lr=0.1, events=[], values={})


@pytest.mark.slow
def test_of_a_long_log_the_newest_process_is_read_with_fewer_steps(tmp_path: Path) -> None:
    log, examined = tmp_path / "log.jsonl", Examined(time_s=0.0, step=1, experiment="rates", values={"a": 1})
    with log.open("w") as file:
        for record in (started(0), watched(1), ended(1), started(1), examined):
            file.write(to_json(record) + "\n")
        file.write('not a record\n{"kind":"step","torn in the middle\n')
        for number in range(2, 30_000):
            file.write(to_json(watched(number)) + "\n" + to_json(step(number)) + "\n")
        file.write(to_json(ended(30_000)) + "\n" + '{"kind":"watched","step":30')
    found = read_newest(log, (Watched, Examined, Ended))
    of_steps = [each.step for each in found.records if isinstance(each, Watched)]
    assert [each for each in found.records if not isinstance(each, Watched)] == [started(1), examined, ended(30_000)]
    assert (found.broken_lines, found.torn) == (2, True)
    assert (
        MAX_LINES_KEPT // 2 < len(of_steps) <= MAX_LINES_KEPT
        and of_steps == sorted(set(of_steps))
        and of_steps[0] < 100
    )
    assert of_steps[-MAX_LINES_KEPT // 4 :] == list(
        range(30_000 - MAX_LINES_KEPT // 4, 30_000)
    )  # the newest are all there


@pytest.mark.parametrize("read_some", [read_course, lambda log: read_newest(log, (Watched, Evaluated)).records])
def test_lines_that_are_no_steps_are_not_looked_at_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_some: Callable[[Path], tuple[Record, ...]]
) -> None:
    monkeypatch.setattr(reader, "MAX_LINES_KEPT", 100)
    thinned: list[int] = []
    thin = reader._without_half

    def counted(lines: list[bytes], is_step: Callable[[bytes], bool]) -> list[bytes]:
        thinned.append(len(lines))
        return thin(lines, is_step)

    monkeypatch.setattr(reader, "_without_half", counted)
    evaluated = Evaluated(time_s=0.0, step=1, loss=1.0, weight=1.0, metrics={}, seconds=0.1)
    (tmp_path / "log.jsonl").write_text((to_json(evaluated) + "\n") * 2000)
    assert len(read_some(tmp_path / "log.jsonl")) == 2000
    assert 0 < len(thinned) < 25, "one look for each line takes quadratic time"


def test_of_a_log_without_end_the_newest_records_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_LINES_KEPT", 100)
    monkeypatch.setattr(reader, "MAX_LINES_OF_ANY_KIND", 400)
    log, examined = tmp_path / "log.jsonl", Examined(time_s=0.0, step=1, experiment="rates", values={"a": 1})
    log.write_text("".join(to_json(replace(examined, step=number)) + "\n" for number in range(2000)))
    steps_read = [each.step for each in read_newest(log, (Watched, Examined)).records if isinstance(each, Examined)]
    assert len(steps_read) < 700 and steps_read[:64] == list(range(64)) and steps_read[-200:] == list(range(1800, 2000))
