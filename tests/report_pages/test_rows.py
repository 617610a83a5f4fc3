"""Curves are thinned without losing a peak, a dip or a value that is not finite; the log is read bit by bit."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest

from tests.report_pages.runs import BEGAN_S, ended, evaluated, found, make_run, started, step
from trainwright.report.pages import log as log_module
from trainwright.report.pages import rows as rows_module
from trainwright.report.pages.log import IncrementalLog
from trainwright.report.pages.render import parts_of, sparkline
from trainwright.report.pages.rows import COLUMNS, NOT_FINITE, as_json, column, fill_missing, seconds, thin_rows
from trainwright.report.pages.view import RunView
from trainwright.runs.records import Evaluated, Record, Started, Telemetry, Watched, to_json


def rows_of(path: Path) -> IncrementalLog:
    log = IncrementalLog(path)
    log.advance()
    return log


def test_every_extreme_stays() -> None:
    random = np.random.default_rng(0)
    rows = np.zeros((50_000, len(COLUMNS)))
    rows[:, COLUMNS.index("step")] = np.arange(1, 50_001)
    loss, norm = column(rows, "loss"), column(rows, "grad_norm")
    loss[:], norm[:] = random.normal(size=50_000), random.random(50_000)
    loss[12_345], loss[23_456], norm[34_567], loss[45_678] = 99.0, -99.0, 1e6, np.inf
    less = thin_rows(rows, 100)
    assert len(less) <= 100 * 20
    kept = set(column(less, "step").astype(int))
    assert {1, 12_346, 23_457, 34_568, 45_679, 50_000} <= kept
    for span in np.array_split(np.arange(50_000), 100):
        finite = loss[span][np.isfinite(loss[span])]
        inside = column(less, "loss")[(column(less, "step") > span[0]) & (column(less, "step") <= span[-1] + 1)]
        assert {finite.min(), finite.max()} <= set(inside)
    assert np.array_equal(thin_rows(less, 100), thin_rows(thin_rows(less, 100), 100)), "what stays, stays"


def test_few_rows_are_left_alone() -> None:
    rows = np.zeros((40, len(COLUMNS)))
    assert thin_rows(rows, 10) is rows


def test_json_tells_missing_from_not_finite() -> None:
    said = as_json({"a": np.array([1.23456789, np.nan, np.inf, 0.0, 3.0]), "b": np.array([np.nan] * 5)})
    assert said == {"a": [1.23457, None, NOT_FINITE, 0, 3]}
    counted = as_json({"step": np.array([1_000_000_001.0, 1_000_000_002.0])})
    assert counted == {"step": [1_000_000_001, 1_000_000_002]}


def test_the_time_between_a_death_and_a_resume_is_not_counted() -> None:
    rows = np.zeros((4, len(COLUMNS)))
    column(rows, "time_s")[:] = [10.0, 20.0, 1000.0, 1010.0]
    assert seconds(rows, [(0.0, 20.0), (995.0, 1010.0)]).tolist() == [10.0, 20.0, 25.0, 35.0]


def test_what_is_missing_between_known_values_is_interpolated() -> None:
    steps, values = np.array([1.0, 2.0, 3.0, 4.0]), np.array([10.0, np.nan, 30.0, np.nan])
    assert np.array_equal(fill_missing(steps, values), [10.0, 20.0, 30.0, np.nan], equal_nan=True)


def test_the_quick_way_to_read_a_log_says_what_the_records_say(tmp_path: Path) -> None:
    odd = [
        step(1),
        step(2, math.nan, grad_norm=math.inf),
        dataclasses.replace(step(3), probed={"loss": 7.0, 'a "b"': 1.0}),
        Watched(time_s=BEGAN_S, step=4, loss=0.5, grad_norm=2.0, lr=0.1, values={"step_s": 0.25, "wait_s": 0.125}),
        Watched(time_s=BEGAN_S, step=5, loss=math.nan, grad_norm=2.0, lr=0.1, events=[("forward", None)]),
    ]
    quick = rows_of(make_run(tmp_path, "quick", odd).log).rows
    other = make_run(tmp_path, "other", [])
    other.log.write_text("".join(to_json(each).replace(',"step":', ', "step" : ', 1) + "\n" for each in odd))
    assert np.array_equal(quick[:, 1:], rows_of(other.log).rows[:, 1:], equal_nan=True) and len(quick) == 5
    assert column(quick, "loss").tolist()[:4] == [2.0, math.inf, 2.0 / math.sqrt(3), 0.5]
    watched = rows_of(make_run(tmp_path, "watched", odd[3:]).log).rows
    assert column(watched, "step_s")[0] == 0.25 and np.isnan(column(watched, "samples")).all()


def test_a_log_is_read_on_from_where_it_was(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", [started(), step(1)])
    log = rows_of(folder.log)
    assert (log.read_rows, log.advance()) == (1, False)
    line = to_json(step(2))
    with folder.log.open("a") as file:
        file.write(line[:40])
    assert not log.advance() and log.read_rows == 1, "a torn line waits"
    with folder.log.open("a") as file:
        file.write(line[40:] + "\n" + "nonsense\n" + to_json(step(3)) + "\n")
    assert log.advance() and column(log.rows, "step").tolist() == [1.0, 2.0, 3.0]
    name = log.name
    folder.log.write_text(to_json(step(7)) + "\n")  # as if begun anew
    assert log.advance() and log.name != name and column(log.rows, "step").tolist() == [7.0]
    folder.log.unlink()
    assert not log.advance()


def test_a_resume_drops_the_steps_that_it_goes_back_over(tmp_path: Path) -> None:
    records: list[Record] = [started(), *map(step, range(1, 11)), evaluated(5, 1.0), evaluated(10, 0.5)]
    records += [started(6, at_s=BEGAN_S + 1000), step(7, 9.0, at_s=BEGAN_S + 1001)]
    log = rows_of(make_run(tmp_path, "run", records).log)
    assert column(log.rows, "step").tolist() == [1, 2, 3, 4, 5, 6, 7] and column(log.rows, "loss")[-1] == 9.0
    assert [each.step for each in log.notes(Evaluated) if isinstance(each, Evaluated)] == [5]
    assert log.counts[Started] == 2 and log.sessions == [(BEGAN_S, BEGAN_S + 10), (BEGAN_S + 1000, BEGAN_S + 1001)]


def test_a_later_diagnosis_does_not_prolong_the_run(tmp_path: Path) -> None:
    later = found(at_step=9000)
    log = rows_of(make_run(tmp_path, "run", [started(), step(1), step(2), ended(2), later]).log)
    assert log.sessions == [(BEGAN_S, ended(2).time_s)]


def test_records_that_come_late_are_put_in_their_place(tmp_path: Path) -> None:
    late = Watched(time_s=BEGAN_S + 2, step=2, loss=5.0, grad_norm=1.0, lr=0.1)
    log = rows_of(make_run(tmp_path, "run", [step(1), step(3), late]).log)
    assert column(log.rows, "step").tolist() == [1, 2, 3] and column(log.rows, "order").tolist() == [1, 3, 2]


def test_a_long_log_is_kept_in_bounded_memory_with_its_peaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "MAX_ROWS", 2000)
    monkeypatch.setattr(log_module, "BUCKETS", 50)
    monkeypatch.setattr(log_module, "CHUNK_BYTES", 2**16)
    losses = {777: 50.0, 3333: math.nan}
    records = [step(number, losses.get(number)) for number in range(1, 6001)]
    log = rows_of(make_run(tmp_path, "run", [*records, found(), ended(6000)]).log)
    assert len(log.rows) < 2500 and log.read_rows == 6000
    kept = dict(zip(column(log.rows, "step").astype(int).tolist(), column(log.rows, "loss").tolist()))
    assert (kept[777], kept[3333]) == (50.0, math.inf) and max(kept) == 6000
    assert len(log.findings) == 1


def test_readings_of_a_long_run_keep_their_extremes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MAX_READINGS", 40)
    monkeypatch.setattr(rows_module, "MAX_READINGS_DRAWN", 16)
    values = [500.0 if n == 77 else -5.0 if n == 123 else float(n % 10) for n in range(200)]
    records: list[Record] = [
        Telemetry(time_s=BEGAN_S + n, step=n, values={"a/x": value} | ({"b/y": 1.0} if n == 150 else {}))
        for n, value in enumerate(values)
    ]
    readings = rows_of(make_run(tmp_path, "run", records).log).readings
    columns = readings.columns()
    assert readings.count == 200 and len(readings.kept) <= 40 and len(columns["a/x"]) <= 16
    assert (columns["a/x"].max(), columns["a/x"].min()) == (500.0, -5.0) and np.nanmax(columns["b/y"]) == 1.0
    assert np.all(np.diff(columns["step"]) >= 0) and np.diff(columns["step"]).max() < 200 / 4, "none of it is coarse"
    assert columns["step"][-1] > 180
    again = rows_of(make_run(tmp_path, "again", [started(), *records, started(100)]).log).readings
    assert max(each.step for each in again.kept) <= 100


def test_a_line_of_the_size_of_a_word_shows_how_the_loss_went(tmp_path: Path) -> None:
    def line(losses: list[float]) -> str:
        records = [step(n + 1, loss) for n, loss in enumerate(losses)]
        return str(sparkline(rows_of(make_run(tmp_path, "run", records).log).means))

    assert line([]) == line([1.0]) == line([math.nan] * 5) == ""
    falling = [float(y) for y in re.findall(r"[\d.]+,([\d.]+)", line([8.0, math.nan, 4.0, 2.0, 1.0]))]
    assert len(falling) == 4 and falling == sorted(falling) and (falling[0], falling[-1]) == (2.0, 20.0)
    assert "nan" not in line([-1.0, 0.0, 3.0, 3.0]) + line([2.0, 2.0, 2.0])


def test_a_long_log_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "CHUNK_BYTES", 2**12)
    log = IncrementalLog(make_run(tmp_path, "run", map(step, range(1, 201))).log)
    assert log.advance(for_s=0.0)
    assert (0 < log.read_rows < 200, bool(log.is_complete)) == (True, False)
    assert log.advance()
    assert (log.read_rows, bool(log.is_complete)) == (200, True)


def test_a_long_log_spans_the_run_before_all_of_it_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LONG_BYTES": 2**16, "SAMPLES": 16, "SAMPLE_BYTES": 2**10, "CHUNK_BYTES": 2**14}.items():
        monkeypatch.setattr(log_module, name, value)
    records = [started(), *map(step, range(1, 2001)), ended(2000)]
    view = RunView(tmp_path / "run", IncrementalLog(make_run(tmp_path, "run", records).log))
    view.log.advance(for_s=0.0)
    steps = column(view.log.rows, "step")
    assert "still being read" in parts_of(view, 0)["head-0"] and view.log.read_rows < 100 and np.all(np.diff(steps) > 0)
    assert steps.max() > 1900 and np.diff(steps).max() < 200
    assert view.state == "finished" and view.seconds > 1900
    assert (
        "No findings" not in parts_of(view, 0)["findings-0"]
        and "findings may be missing" in parts_of(view, 0)["head-0"]
    )
    while not view.log.is_complete:
        view.log.advance(for_s=0.0)
    alone = rows_of(view.log.path)
    assert np.array_equal(view.log.rows, alone.rows, equal_nan=True) and view.log.sessions == alone.sessions
    assert view.log.newest_process == alone.newest_process


def test_a_log_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", [step(1)])
    folder.log.rename(tmp_path / "elsewhere")
    folder.log.symlink_to(tmp_path / "elsewhere")
    assert not IncrementalLog(folder.log).advance()


def test_means_are_of_all_records_of_a_log_that_was_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "MAX_ROWS", 2000)
    monkeypatch.setattr(log_module, "BUCKETS", 50)
    monkeypatch.setattr(log_module, "CHUNK_BYTES", 2**16)
    noise = np.random.default_rng(0).random(6000)
    log = rows_of(make_run(tmp_path, "run", (step(n, float(1 + noise[n - 1])) for n in range(1, 6001))).log)
    means = log.means.columns()
    assert 30 <= len(means["step"]) <= 64 and np.all(np.diff(means["step"]) > 0)
    assert np.abs(means["loss"][1:-1] - 1.5).max() < 0.1, "what stays of the rows are extremes: those would mislead"
    assert np.allclose(means["wait_s"], 0.1) and np.allclose(means["step_s"], 0.5)


def test_means_leave_out_what_is_not_finite_and_what_is_done_again(tmp_path: Path) -> None:
    losses = {20: math.nan, **dict.fromkeys(range(64, 96), math.inf)}
    records: list[Record] = [step(n, losses.get(n, 1.0)) for n in range(1, 129)]
    means = rows_of(make_run(tmp_path, "run", records).log).means.columns()
    known = dict(zip(means["step"].tolist(), means["loss"].tolist()))
    assert set(known.values()) == {1.0, math.inf} and all(known[at] == math.inf for at in known if 66 <= at <= 93)
    again = [*records, started(40), *(step(n, 3.0) for n in range(41, 61))]
    means = rows_of(make_run(tmp_path, "again", again).log).means.columns()
    assert means["step"].max() <= 61 and means["loss"][-1] == 3.0
    assert {at: loss for at, loss in zip(means["step"], means["loss"]) if at < 38 and loss != 1.0} == {20.0: math.inf}


def test_numbers_end_with_their_line(tmp_path: Path) -> None:
    """Memory was the last value of a line in an earlier version."""
    path = tmp_path / "log.jsonl"
    path.write_text("".join(re.sub(r',"ids_hash".*', "}", to_json(step(number))) + "\n" for number in (1, 2, 3)))
    rows = rows_of(path).rows
    assert column(rows, "step").tolist() == [1.0, 2.0, 3.0] and set(column(rows, "mem_bytes")) == {2.0**20}
