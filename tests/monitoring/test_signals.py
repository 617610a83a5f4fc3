"""Real signals: which are heard, what is said while the scheduler's patience runs out, and who must not hear them."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import mtrand
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, RandomSampler

from tests import forked
from trainwright.checkpoint.rng import seed_all
from trainwright.data.loading import Loading, StepBatches
from trainwright.data.ready_batches import ReadyBatches
from trainwright.data.sample_order import UserOrder
from trainwright.engine.loop import StopRequest
from trainwright.errors import UsageError
from trainwright.monitoring.signals import Signals, _default_for_late, grace_s
from trainwright.runs.lock import RunLock


@contextmanager
def listening(signals: Signals) -> Iterator[Signals]:
    signals.listen()
    try:
        yield signals
    finally:
        signals.close()


@pytest.fixture(autouse=True)
def handlers_are_put_back() -> Iterator[None]:
    """A run that quits leaves handlers for the rest of a storm. Under nohup SIGHUP is ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    before = handlers()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)  # type: ignore[arg-type]


def handlers() -> dict[signal.Signals, object]:
    return {
        number: _default_for_late(number, signal.getsignal(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    }


def test_only_the_named_ones_and_sigint_are_taken_over() -> None:
    before = handlers()
    with listening(Signals(pytest.fail, names=("SIGUSR2", "SIGINT", "SIGUNHEARDOF"))):
        taken = {number for number, handler in handlers().items() if handler != before[number]}
        assert taken == {signal.SIGINT} and signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL
    assert handlers() == before and signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_a_signal_that_was_named_is_heard() -> None:
    said: list[str] = []
    with listening(Signals(said.append, names=("SIGHUP",))) as signals:
        calls: list[int | None] = []
        signals.on_received = lambda: calls.append(signals.received)
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.received == signal.SIGHUP and calls == [signal.SIGHUP]
        signals.on_received = lambda: calls.append(None)
        assert calls == [signal.SIGHUP, None], "whoever comes late is told at once"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert said == ["SIGHUP: saving at the end of this step; a second signal quits at once"]


def test_signals_just_after_a_stopped_run_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(Signals(lambda _: None)):
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)  # would end the process
    os.kill(os.getpid(), signal.SIGINT)
    monkeypatch.setattr("trainwright.monitoring.signals.IGNORE_SIGNALS_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_repeated_hangup_counts_once() -> None:
    with listening(Signals(lambda _: None)) as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.received == signal.SIGHUP
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with listening(Signals(pytest.fail)) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


class Finalized:
    """Python drops what is raised in a finalizer."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)


def test_a_signal_that_comes_in_a_finalizer_is_not_lost() -> None:
    said: list[str] = []
    with listening(Signals(said.append)) as signals:
        with pytest.raises(StopRequest), signals.at_once("ending now"):
            Finalized()
            time.sleep(60)
        assert sys.unraisablehook == signals._on_dropped
    assert said == ["SIGTERM: ending now; a second signal quits at once"]
    assert sys.unraisablehook != signals._on_dropped


def test_a_second_signal_that_comes_in_a_finalizer_is_not_lost() -> None:
    said: list[str] = []
    with listening(Signals(said.append)), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        Finalized()
        time.sleep(60)
    assert said == ["SIGINT: saving at the end of this step; a second signal quits at once"]


def test_outside_the_main_thread_nothing_is_taken_over() -> None:
    before, during = handlers(), []
    signals = Signals(pytest.fail, grace_s=10.0)

    def elsewhere() -> None:
        with listening(signals):
            during.append(handlers())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert during == [before]


@pytest.mark.parametrize(("text", "seconds"), [("30", 30.0), ("0.5", 0.5), (" 1e2 ", 100.0)])
def test_a_grace(text: str, seconds: float) -> None:
    assert grace_s({"TRAINWRIGHT_GRACE_S": text}) == seconds
    assert grace_s({}) is None


@pytest.mark.parametrize("text", ["", "soon", "0", "-30", "nan", "inf", "30s"])
def test_a_grace_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="TRAINWRIGHT_GRACE_S is not a positive number of seconds") as caught:
        grace_s({"TRAINWRIGHT_GRACE_S": text})
    assert repr(text) in caught.value.message and "TRAINWRIGHT_GRACE_S=30" in caught.value.remedy


# A run whose third step gets a signal and takes until WAIT_FOR was said (or the test's patience ends).
RUN = """
import os, signal, sys, threading
import numpy as np
import torch
from trainwright.engine.loop import run
from trainwright.engine.step import make_step
from trainwright.monitoring.signals import Signals, grace_s
from trainwright.checkpoint.cursor import Cursor, MicroBatch, StepBatch
from trainwright.checkpoint.train_state import TrainState

wait_for, saving_s = sys.argv[1], sys.argv[2]
heard = threading.Event()

def say(text):
    print(text, flush=True)
    if wait_for in text:
        heard.set()

def loss(model, batch):
    if state.step == 2:
        os.kill(os.getpid(), signal.SIGTERM)
        heard.wait(60)
    return model(batch).square().mean()

signals = Signals(say, grace_s=grace_s(os.environ))
signals.newest = lambda: "step-00000002"
if saving_s != "unknown":
    signals.saving_s = lambda: float(saving_s)
signals.listen()
model = torch.nn.Linear(2, 1)
state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
batches = [StepBatch((MicroBatch(torch.ones(3, 2), np.arange(3)),), Cursor(0, 3))] * 9
outcome = run(state, batches, make_step(loss), until=lambda state: state.step / 9, observers=[signals])
print(outcome.ending, outcome.step, outcome.stop.save, outcome.stop.exit_code, threading.active_count())
"""


def said_by_a_run(*, grace: str | None, wait_for: str, saving_s: str = "unknown") -> list[str]:
    done = forked.run(RUN, wait_for, saving_s, env={} if grace is None else {"TRAINWRIGHT_GRACE_S": grace})
    assert done.returncode == 0 and not done.stderr
    *said, outcome = done.stdout.splitlines()
    assert outcome == "stopped 3 True 75 1", "it saves whatever the time, and leaves no thread"
    return said


SAVING = "SIGTERM: saving at the end of this step"


@pytest.mark.process
@pytest.mark.parametrize(("grace", "left"), [(None, ""), ("600", " (600 s are left)")])
def test_a_step_that_ends_in_time(grace: str | None, left: str) -> None:
    said = said_by_a_run(grace=grace, wait_for="SIGTERM", saving_s="5")
    assert said == [f"{SAVING}{left}; a second signal quits at once"]


@pytest.mark.process
def test_a_step_that_outlasts_the_grace_is_told_before_the_kill() -> None:
    first, late = said_by_a_run(grace="0.5", wait_for="newest")
    assert first == f"{SAVING} (0.5 s are left); a second signal quits at once"
    assert late == (
        "the step has not ended after 0.4 s of 0.5 s; if the kill comes first, the newest checkpoint is step-00000002"
    )


@pytest.mark.process
def test_a_save_that_takes_longer_than_what_is_left_is_tried_all_the_same() -> None:
    _, times = said_by_a_run(grace="600", wait_for="SIGTERM", saving_s="3600")
    assert times.startswith("saving step 3: ") and "s are left and the last save took 3600.0 s" in times
    assert times.endswith("the newest checkpoint is step-00000002")


POOL = """
import multiprocessing, os, signal, sys
from trainwright.monitoring.signals import Signals
signals = Signals(print)
signals.listen()
with multiprocessing.get_context("fork").Pool(1) as pool:  # leaving it sends SIGTERM and waits
    child = pool.apply(os.getpid)
    os.kill(child, signal.SIGINT)
    os.kill(child, signal.SIGUSR1)
    assert pool.apply(os.getpid) == child
pool.join()
assert signals.received is None
"""


@pytest.mark.process
def test_a_forked_child_answers_to_its_parent_alone() -> None:
    done = forked.run(POOL)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "a child speaks for the run"


# Who reads what it prints goes on reading only when the signal has been answered: until then a print is under way.
BLOCKED = """
import os, signal, threading
from rich.console import Console
from trainwright.monitoring.progress import Progress
from trainwright.monitoring.signals import Signals
asked, read = threading.Event(), []
from_here, to_there = os.pipe()
out = os.fdopen(to_there, "w")
signals = Signals(Progress(Console(file=out, force_terminal=False)).say)
signals.on_received = asked.set
signals.listen()

def reader():
    while part := os.read(from_here, 1 << 16):
        read.append(part)
        if not asked.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
            asked.wait(60)

thread = threading.Thread(target=reader)
thread.start()
for _ in range(4):
    print("x" * 100_000, file=out, flush=True)
signals.close()
out.close()
thread.join()
print(asked.is_set(), b"SIGTERM: saving at the end of this step; a second signal quits at once" in b"".join(read))
"""


@pytest.mark.process
def test_a_signal_in_the_midst_of_printing() -> None:
    done = forked.run(BLOCKED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]


PREEMPTED = """
import os, signal, sys
from pathlib import Path
from trainwright.monitoring.signals import Signals
from trainwright.runs.lock import RunLock
signals = Signals(print)
signals.listen()
if sys.argv[2] == "before":
    os.kill(os.getpid(), signal.SIGTERM)
lock = RunLock.acquire(Path(sys.argv[1]))
signals.on_received = lock.excuse
lock.beat(417)
if sys.argv[2] == "after":
    os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.process
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_when_the_patience_is_over_is_not_the_fault_of_the_step(tmp_path: Path, when: str) -> None:
    done = forked.run(PREEMPTED, str(tmp_path), when)
    assert done.returncode == -signal.SIGKILL
    lock = RunLock.acquire(tmp_path)
    lock.release(clean=True)
    assert (lock.died_in_step, lock.deaths) == (None, 0)


class Drawing(Dataset[Tensor]):
    """Draws from all generators; a collate function of the tests draws again."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(3) + random.random() + float(np.random.randn())


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (Drawing()[index] for index in range(8))


def drawn_together(samples: list[Tensor]) -> Tensor:
    return torch.stack(samples) + torch.randn(1)


def in_batches() -> Iterator[Tensor]:
    return (torch.randn(2, 3) + random.random() + float(np.random.randn()) for _ in range(4))


OURS = tuple(f"/{name}.py" for name in ("rng", "generators", "fetch", "contextlib", "order", "ready"))


def interrupted(dataset: object, loading: Loading, line: int) -> bool:
    """Send SIGTERM before the given line that runs while a batch is read. Return False if fewer lines run."""
    left = [line]

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGTERM)
        return trace if frame.f_code.co_filename.endswith(OURS) else None

    with listening(Signals(lambda text: None)) as signals:
        batches = signals.batches(StepBatches(dataset, loading))
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            next(batches)
        except StopRequest as request:
            assert request.stop.save
            return True
        finally:
            sys.settrace(before)
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "loading"),
    [
        (Drawing(), Loading(2, 2, collate=drawn_together)),
        (Endless(), Loading(2, 2, collate=drawn_together)),
        (ReadyBatches(in_batches), Loading(2, 2)),
        (Drawing(), Loading(2, 2, order=UserOrder(RandomSampler(Drawing())))),
    ],
    ids=["samples", "stream", "ready", "sampler"],
)
def test_a_signal_at_any_line_of_reading_leaves_the_generators_as_they_were(dataset: object, loading: Loading) -> None:
    """Else a resumed run would draw other numbers: a signal can come while they are put back."""
    for line in count(1):
        seed_all(7)
        numpys = mtrand.get_bit_generator()
        was_read = not interrupted(dataset, loading, line)
        after = [random.random(), float(np.random.randn()), float(torch.randn(()))]
        assert mtrand.get_bit_generator() is numpys, line
        seed_all(7)
        assert after == [random.random(), float(np.random.randn()), float(torch.randn(()))], line
        if was_read:
            assert line > 50
            return


class Forgiving(Drawing):
    """Takes a signal for a sample that cannot be read."""

    def __init__(self, other: Callable[[], Tensor]) -> None:
        self.other = other

    def __getitem__(self, index: int) -> Tensor:
        try:
            signal.raise_signal(signal.SIGTERM)
            return torch.ones(3)
        except BaseException:
            return self.other()


def test_a_dataset_that_catches_everything_does_not_catch_a_signal() -> None:
    for other in (lambda: torch.zeros(3), lambda: torch.zeros(3)[5]):
        with listening(Signals(lambda text: None)) as signals, pytest.raises(StopRequest):
            next(signals.batches(StepBatches(Forgiving(other), Loading(2, 2))))
