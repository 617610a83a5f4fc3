"""The progress line: its figures against the log, and what a terminal, a dumb one and a file are sent."""

from __future__ import annotations

import io
import math
import os
import re
import statistics
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from tests.monitoring.small_run import batches, make_state
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.evaluate import EvaluationResult
from trainwright.engine.loop import for_steps, run
from trainwright.engine.loss import Loss
from trainwright.engine.observer import Stop
from trainwright.engine.step import StepResult, make_step
from trainwright.monitoring.cadence import Every
from trainwright.monitoring.journal import Journal
from trainwright.monitoring.progress import (
    MIN_STEPS_LIVE,
    LossMean,
    Progress,
    ProgressLine,
    TimeSpent,
    counts_in_words,
    duration,
)
from trainwright.monitoring.step_log import StepLog
from trainwright.runs.reader import read
from trainwright.runs.records import Found, Step
from trainwright.runs.writer import LogWriter

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-HJKlh]")
NAMES = ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
STEPS = 40
Knowing = Callable[[Progress], None]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def loss(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    x, y = batch
    return Loss((model(x) - y).square().sum(), float(len(x)))


def train(
    console: Console, *, steps: int = STEPS, know: Knowing = lambda progress: None, log: Path | None = None
) -> None:
    """A run whose loss falls fast, in which the clock goes on by 3 s with each step."""
    seconds = iter(range(10_000))
    progress = Progress(console, clock=lambda: next(seconds) * 3.0)
    progress.has_epochs, progress.epochs, progress.references = True, 2.5, {"uniform": 30.0, "bigram": 0.01}
    know(progress)
    progress.say("[red]a line")
    progress.evaluated(0, EvaluationResult(2.5, 10.0, {"accuracy": 0.5}))
    state = make_state()
    state.optimizer.param_groups[0]["lr"] = 0.03
    observers = [progress]
    if log is not None:
        observers.append(StepLog(Journal(LogWriter(log), pytest.fail), [], Every(steps=1)))  # type: ignore[arg-type]
    run(state, batches(steps), make_step(loss), until=for_steps(steps), observers=observers)


def in_a_file(**options: object) -> str:
    file = io.StringIO()
    train(Console(file=file, width=200), **options)  # type: ignore[arg-type]
    return file.getvalue()


def on_a_terminal(*, width: int = 200, **options: object) -> str:
    """Return what a pseudo-terminal receives."""
    master, slave = os.openpty()
    pieces: list[bytes] = []

    def read_all() -> None:
        try:
            while piece := os.read(master, 65536):
                pieces.append(piece)
        except OSError:  # the other end was closed
            return

    reader = threading.Thread(target=read_all)
    reader.start()
    with open(slave, "w", encoding="utf-8") as file:  # noqa: PTH123
        train(Console(file=file, width=width), **options)  # type: ignore[arg-type]
    reader.join()
    os.close(master)
    return b"".join(pieces).decode()


def shown(text: str) -> Iterator[tuple[int, float]]:
    """Step and loss of each line."""
    return ((int(step), float(loss)) for step, loss in re.findall(r"step (\d+)  loss ([-+.e\d]+)", text))


@pytest.mark.parametrize("kind", ["file", "terminal"])
def test_the_line_agrees_with_the_log(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 2 % at each line; ``test_notebook.py`` has the same of a notebook."""
    monkeypatch.setenv("TERM", "xterm-256color")
    said = (in_a_file if kind == "file" else on_a_terminal)(log=tmp_path / "log")
    logged = {each.step: each.loss for each in read(tmp_path / "log").records if isinstance(each, Step)}
    lines = dict(shown(said))
    assert len(logged) == STEPS and len(lines) >= STEPS // 4 and max(lines) == STEPS
    assert max(logged.values()) > 20 * min(logged.values()), "the loss falls fast"
    before = 0
    for step, loss in lines.items():
        first = before + 1 if kind == "file" else max(1, min(before + 1, step - MIN_STEPS_LIVE + 1))
        expected = statistics.fmean(logged[each] for each in range(first, step + 1))
        assert loss == pytest.approx(expected, rel=0.02), step
        before = step


def test_a_file_gets_plain_lines_now_and_then() -> None:
    first, evaluated, *lines = in_a_file().splitlines()
    assert first == "[red]a line"
    assert evaluated == "step      0   validation loss 2.500   accuracy 0.5   uniform 30.00 > [2.50] > bigram 0.01"
    assert len(lines) == STEPS // 4, "a line each 10 s, and a step takes 3"
    for part in ("epoch 1/2.5", "val 2.500", "lr 0.03", "ETA", "GiB", "samples/s", "uniform 30.00 > ["):
        assert all(part in line for line in lines), part


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_has_one_line_that_changes(monkeypatch: pytest.MonkeyPatch, no_color: bool) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    said = on_a_terminal()
    assert CURSOR.search(said) and "samples/s" in said and "GiB" in said
    assert not no_color or not COLOUR.search(said)


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    said = on_a_terminal()
    assert "\x1b" not in said and said.count("samples/s") == STEPS // 4


@pytest.mark.parametrize("forced", [False, True])
def test_a_file_is_not_filled_with_lines(monkeypatch: pytest.MonkeyPatch, forced: bool) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    if forced:
        monkeypatch.setenv("FORCE_COLOR", "1")
    said = in_a_file()
    assert not CURSOR.search(said) and said.count("samples/s") == STEPS // 4


LINE = ProgressLine(
    fraction=0.43,
    step=860,
    loss=2.912345,
    lr=2.5e-4,
    memory_bytes=2**31,
    samples_s=1234.0,
    epoch=3,
    epochs=7.0,
    val=2.95,
    findings="1 warning",
    skipped=2,
    left_s=130.0,
    tokens_s=78976.0,
    mfu=0.412,
    wait=0.14,
    references={"bigram": 2.46},
)


def test_the_whole_line() -> None:
    assert LINE.text() == (
        " 43%  epoch 3/7  step 860  loss 2.912  val 2.950  lr 0.00025  1 warning  2 steps skipped  ETA 2m10s  "
        "process 2.00 GiB  waits for data 14%  1,234 samples/s  78,976 tokens/s  MFU 41.2%  [2.91] > bigram 2.46"
    )
    bare = ProgressLine(fraction=0.0, step=1, loss=math.nan, lr=1.0, memory_bytes=0, samples_s=0.0)
    assert bare.text() == "  0%  step 1  loss not finite  lr 1  ETA ?  process 0.00 GiB  0 samples/s"


def test_a_narrow_terminal_shows_skips_and_memory_and_not_the_pace() -> None:
    narrow = LINE.text(120)
    assert len(narrow) <= 120 and "2 steps skipped" in narrow and "2.00 GiB" in narrow and "samples/s" not in narrow
    assert LINE.text(40) == " 43%  epoch 3/7  step 860  loss 2.912"
    assert LINE.text(1) == " 43%", "no part is cut off in its middle"
    assert all(len(LINE.text(width)) <= width for width in range(5, 250))


def test_a_narrow_terminal_is_sent_lines_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    said = on_a_terminal(width=60)
    assert "samples/s" not in said and "\u2026" not in said and list(shown(said))


@pytest.mark.parametrize(("least", "expected"), [(1, 3.0), (4, 2.5)])
def test_the_mean_is_over_the_steps_since_the_last_line(least: int, expected: float) -> None:
    """And over some steps at least, where lines come fast."""
    mean = LossMean(least)
    for value in (9.0, 1.0, 2.0, 4.0):
        mean.add(torch.tensor(value))
    assert mean.take() == 4.0
    for value in (3.0, 3.0):
        mean.add(torch.tensor(value))
    assert mean.take() == (3.0 if least == 1 else statistics.fmean([2.0, 4.0, 3.0, 3.0]))


def test_the_mean_of_many_steps_is_exact_and_leaves_out_what_is_not_finite() -> None:
    mean, values = LossMean(16), torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for value in values:
        mean.add(value)
        mean.add(torch.tensor(math.inf))
    assert mean.take() == pytest.approx(float(values.double().mean()), rel=1e-4)
    mean.add(torch.tensor(math.nan))
    for _ in range(16):
        mean.add(torch.tensor(math.nan))
    assert math.isnan(mean.take())


def found(severity: str) -> Found:
    return Found(time_s=0.0, step=1, code="x", severity=severity, sure=1.0, symptom="", cause="", remedy="")


def test_findings_are_counted_by_severity() -> None:
    assert counts_in_words([]) == counts_in_words([found("info")]) == "", "nothing found is not said to be healthy"
    assert (
        counts_in_words([found("critical"), found("warning"), found("info"), found("warning")])
        == "1 critical, 2 warnings"
    )
    assert counts_in_words([found("warning")]) == "1 warning"


def test_the_line_has_findings_and_utilization_where_they_are_known() -> None:
    findings: list[Found] = []

    def know(progress: Progress) -> None:
        progress.findings, progress.peak_samples_s = lambda: findings, 10.0

    plain, known = in_a_file(), in_a_file(know=know)
    assert "MFU" not in plain and "critical" not in plain + known
    rates = [float(each) for each in re.findall(r"([0-9]+) samples/s", known)]
    shares = [float(each) for each in re.findall(r"MFU ([0-9.]+)%", known)]
    assert len(rates) == len(shares) == STEPS // 4
    assert all(abs(share - 10 * rate) <= 10 * 0.5 + 0.05 for rate, share in zip(rates, shares)), "as both are rounded"
    findings.append(found("critical"))
    assert in_a_file(know=know).count("  1 critical  ") == STEPS // 4


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "?"), (math.nan, "?"), (8.2, "8s"), (130, "2m10s"), (3725, "1h02m")]
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


class Clock:
    """A clock that the run itself puts forward."""

    def __init__(self) -> None:
        self.now_s = self.examined_s = 0.0


class Costly:
    """An observer that takes some seconds of a clock after each step, and more of them for examinations at first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def observe(self, result: StepResult, state: TrainState) -> None:
        examined_s = 5.0 if result.step < 8 else 0.5
        self._clock.examined_s += examined_s
        self._clock.now_s += examined_s + 0.25 + 1.0  # and the step that follows

    def close(self) -> None: ...


def test_the_time_between_steps_is_measured_by_what_it_goes_into() -> None:
    clock = Clock()
    spent = TimeSpent(lambda: clock.examined_s, lambda: clock.now_s)
    assert spent.measured() is None
    seen = iter(range(1, 100))

    class Steps:
        """The step takes 1 s of the clock; in every eighth an evaluation takes 3 s more."""

        def observe(self, result: StepResult, state: TrainState) -> Stop | None:
            result.step_s = 1.0
            if next(seen) % 8 == 0:
                result.evaluation = EvaluationResult(1.0, 1.0, seconds=3.0)
                clock.now_s += 3.0
            return None

        def close(self) -> None: ...

    run(make_state(), batches(40), make_step(loss), until=for_steps(40), observers=[Steps(), spent, Costly(clock)])
    measured = spent.measured()
    assert measured is not None and measured.evaluation_s == 3.0
    assert measured.step_s == pytest.approx(1.0) and measured.beside_s == pytest.approx(0.25)
    assert measured.examination_s == pytest.approx(0.5), "those of the first steps are over"
    assert measured.examined_s == pytest.approx(7 * 5.0 + 32 * 0.5)


def test_the_pace_of_the_first_line_counts_from_the_first_step() -> None:
    """Between progress and the first step are plan and dry run."""
    now_s, state, file = [0.0], make_state(), io.StringIO()
    progress = Progress(Console(file=file, width=200), clock=lambda: now_s[0])
    now_s[0] = 100.0
    run(state, batches(1), make_step(loss), until=for_steps(1), observers=[progress])
    assert file.getvalue() == "", "ten seconds have not passed since the first step began"


def test_text_is_printed_unchanged() -> None:
    out = io.StringIO()
    text = "data.jsonl:10:100: :smile: [bold]x[/bold]"
    Progress(Console(file=out)).print(text)
    assert out.getvalue() == f"{text}\n"
