"""Code that must leave no trace writes no file, starts no process and prints nothing; other threads may."""

from __future__ import annotations

import builtins
import contextlib
import gc
import io
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from trainwright.checkpoint.effects import NotIsolated, no_effects
from trainwright.checkpoint.isolation import isolated
from trainwright.checkpoint.reach import ReachableState

EFFECTS: dict[str, Callable[[Path], object]] = {
    "open": lambda path: path.open("w"),
    "append": lambda path: open(path, "a"),  # noqa: SIM115, PTH123
    "io.open": lambda path: io.open(path, "r+"),  # noqa: SIM115, UP020
    "os.open": lambda path: os.open(path, os.O_CREAT | os.O_WRONLY),
    "write_text": lambda path: path.write_text("x"),
    "numpy": lambda path: np.save(path, np.zeros(1)),
    "torch": lambda path: torch.save(1, path),
    "mkdir": lambda path: path.mkdir(),
    "unlink": lambda path: Path(__file__).with_name("nothing").unlink(),
    "rename": lambda path: path.rename(path.with_name("other")),
    "os.write": lambda path: os.write(1, b"x"),
    "os.system": lambda path: os.system("true"),
    "process": lambda path: subprocess.run(["true"], check=False),
    "connection": lambda path: socket.socket().connect(("127.0.0.1", 1)),
    "environment": lambda path: os.environ.update(TRAINWRIGHT_TEST="1"),
    "thread": lambda path: threading.Thread(target=print).start(),
}


@pytest.mark.parametrize("name", EFFECTS)
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_an_effect_is_refused_before_it_happens(name: str, tmp_path: Path) -> None:
    with no_effects() as refused, pytest.raises(NotIsolated):
        EFFECTS[name](tmp_path / "file")
    assert len(refused) == 1 and list(tmp_path.iterdir()) == []


def test_reading_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with no_effects() as refused:
        assert (tmp_path / "file").read_text() == "x" and list(tmp_path.iterdir())
    assert refused == []


def test_output_is_dropped(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with no_effects():
        print("out")
        print("err", file=sys.stderr)
        logging.getLogger("attack").warning("logged")
    print("after")
    logging.getLogger("attack").warning("after")
    assert capsys.readouterr().out == "after\n" and [each.message for each in caplog.records] == ["after"]


def test_another_thread_has_its_effects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    go, done = threading.Event(), threading.Event()

    def work() -> None:
        go.wait()
        (tmp_path / "file").write_text("x")
        print("other")
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    with no_effects():
        go.set()
        assert done.wait(10)
    thread.join()
    assert (tmp_path / "file").exists() and capsys.readouterr().out == "other\n"


def test_everything_is_as_before_but_what_somebody_else_has_replaced() -> None:
    before, stdout, mine = builtins.open, sys.stdout, io.StringIO()
    with no_effects():
        with no_effects():
            pass
        assert builtins.open is not before
        sys.stdout = mine
    try:
        assert builtins.open is before and sys.stdout is mine
    finally:
        sys.stdout = stdout


def test_a_refusal_that_the_code_catches_is_told() -> None:
    state = [0]
    with pytest.raises(NotIsolated, match="opens a file to write"), isolated(ReachableState([("state", state)])):
        state.append(1)
        with contextlib.suppress(NotIsolated):
            open("nowhere", "w")  # noqa: SIM115, PTH123
    assert state == [0]


def test_an_error_that_the_code_makes_of_a_refusal_is_told() -> None:
    with pytest.raises(NotIsolated, match="opens a file to write"), isolated(ReachableState(())):
        try:
            open("nowhere", "w")  # noqa: SIM115, PTH123
        except NotIsolated as error:
            raise RuntimeError("cannot log") from error


def test_code_with_a_gap_does_not_run() -> None:
    with pytest.raises(NotIsolated, match="numbers is an iterator"), isolated(ReachableState([("numbers", iter([]))])):
        pytest.fail("it ran")


def test_garbage_is_finalized_afterwards() -> None:
    """As the iterator of a DataLoader, which ends its workers when it is collected."""
    ended: list[object] = []

    class Ends:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            ended.append(os.kill(os.getpid(), 0))  # type: ignore[func-returns-value]

    with no_effects() as refused:
        Ends()
        _kept = [[] for _ in range(10_000)]  # type: ignore[var-annotated]
    assert gc.isenabled() and refused == []
    gc.collect()
    assert ended == [None]
