"""What reaches a terminal, a dumb one, and a file, as the environment asks: through a real pseudo-terminal."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from rich.console import Console

from trainwright.engine.loop import run
from trainwright.engine.loss import Loss
from trainwright.engine.step import make_step
from trainwright.engine.until import for_steps
from trainwright.observe.progress import Progress
from trainwright.state.cursor import Cursor, MicroBatch, StepBatch
from trainwright.state.train_state import TrainState

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-HJKlh]")
STEPS = 12
NAMES = ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def loss(model: torch.nn.Module, x: torch.Tensor) -> Loss:
    return Loss(model(x).square().sum(), float(len(x)))


def train(console: Console) -> None:
    seconds = iter(range(10_000))
    progress = Progress(console, clock=lambda: next(seconds) * 3.0)
    progress.say("[red]a line")
    model = torch.nn.Linear(4, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.01))
    batch = StepBatch((MicroBatch(torch.randn(3, 4), np.arange(3)),), Cursor(0, 3))
    run(state, [batch] * STEPS, make_step(loss), until=for_steps(STEPS), observers=[progress])


def on_a_terminal() -> str:
    """What a terminal is sent."""

    def pieces(end: int) -> Iterator[bytes]:
        os.set_blocking(end, False)
        try:
            while piece := os.read(end, 65536):
                yield piece
        except OSError:  # all is read
            return

    master, slave = os.openpty()
    with open(slave, "w", encoding="utf-8") as file:  # noqa: PTH123
        train(Console(file=file, width=160))
        file.flush()
        text = b"".join(pieces(master)).decode()
    os.close(master)
    return text


def in_a_file() -> str:
    file = io.StringIO()
    train(Console(file=file, width=160))
    return file.getvalue()


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_has_one_line_that_changes(monkeypatch: pytest.MonkeyPatch, no_color: bool) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    said = on_a_terminal()
    assert CURSOR.search(said)
    assert "samples/s" in said
    assert "GiB" in said
    assert not no_color or not COLOUR.search(said)


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    said = on_a_terminal()
    assert "\x1b" not in said
    assert said.count("samples/s") == STEPS // 4  # a line each 10 s, and a step took 3


@pytest.mark.parametrize("forced", [False, True])
def test_a_file_is_not_filled_with_lines(monkeypatch: pytest.MonkeyPatch, forced: bool) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    if forced:
        monkeypatch.setenv("FORCE_COLOR", "1")
    said = in_a_file()
    assert not CURSOR.search(said)
    assert said.count("samples/s") == STEPS // 4
