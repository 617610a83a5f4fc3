"""Observers look at steps: when they are due, what they write, and that they change nothing."""

from __future__ import annotations

import hashlib
import io
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from tests.monitoring.small_run import batches, make_state
from trainwright.checkpoint.cursor import BadSample
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.loop import for_steps, run
from trainwright.engine.loss import Loss
from trainwright.engine.step import StepResult, make_step
from trainwright.monitoring.cadence import Every
from trainwright.monitoring.journal import Journal
from trainwright.monitoring.progress import Progress
from trainwright.monitoring.samples import TextSamples
from trainwright.monitoring.saving import SavePolicy, Saving
from trainwright.monitoring.signals import STOPPED_EXIT_CODE, Signals, default_handler, set_late_handlers
from trainwright.monitoring.step_log import StepLog
from trainwright.runs.reader import read
from trainwright.runs.records import Quarantined, Skipped, Step
from trainwright.runs.writer import LogWriter


def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Loss:
    x, y = batch
    return Loss((model(x) - y).square().sum(), float(len(x)))


def record(path: Path, *, every: Every, poisoned: int = -1, count: int = 12) -> StepLog:
    journal = Journal(LogWriter(path), warn=pytest.fail)
    recorder = StepLog(journal, [], every, wall_clock=lambda: 1.0)
    state = make_state()
    run(state, batches(count, poisoned=poisoned), make_step(loss), until=for_steps(count), observers=[recorder])
    recorder.record_skipped(state)
    journal.close()
    return recorder


def test_the_first_and_every_due_step_are_logged(tmp_path: Path) -> None:
    record(tmp_path / "log", every=Every(steps=5))
    logged = [r for r in read(tmp_path / "log").records if isinstance(r, Step)]
    assert [r.step for r in logged] == [1, 5, 10, 12], "and the last one"
    assert [r.samples for r in logged] == [3, 15, 30, 36]
    assert all(r.weight == 3.0 and r.lr == 0.01 and r.mem_bytes > 0 for r in logged)
    expected = hashlib.blake2b(np.arange(15, 30).tobytes(), digest_size=8).hexdigest()
    assert logged[2].ids_hash == expected, "of all steps since the last record"


def test_a_skipped_step_is_named_in_the_log(tmp_path: Path) -> None:
    recorder = record(tmp_path / "log", every=Every(steps=5), poisoned=6)
    skipped = [r for r in read(tmp_path / "log").records if isinstance(r, Skipped)]
    assert [(r.step, r.micro_batch, r.sample_ids) for r in skipped] == [(7, 0, (18, 19, 20))]
    assert recorder.num_skipped == 1


def test_every_keeps_its_rhythm_over_a_resume() -> None:
    state = make_state()
    every = Every(seconds=10.0)
    due = []
    for state.step, state.elapsed_s in enumerate((4.0, 9.0, 11.0, 19.0, 20.5, 45.0, 46.0), start=1):
        due.append(every.due(state))
    assert due == [False, False, True, False, True, True, False]
    state.step, state.elapsed_s = 100, 47.0
    resumed = Every(seconds=10.0, since=state)
    state.elapsed_s = 49.0
    assert not resumed.due(state)
    state.elapsed_s = 50.1
    assert resumed.due(state)


def test_every_share_of_the_run() -> None:
    state, every = make_state(), Every(fraction=0.25)
    due = []
    for state.step, state.fraction in enumerate((0.0, 0.2, 0.26, 0.3, 0.76), start=1):
        due.append(every.due(state))
    assert due == [False, False, True, False, True]


def test_a_full_disk_costs_log_lines_and_no_training(tmp_path: Path) -> None:
    if not os.access("/dev/full", os.W_OK):
        pytest.skip("this system has no /dev/full")
    said: list[str] = []
    journal = Journal(LogWriter("/dev/full"), said.append)
    state = make_state()
    recorder = StepLog(journal, [], Every(steps=1))
    outcome = run(state, batches(5), make_step(loss), until=for_steps(5), observers=[recorder])
    journal.close()
    assert outcome.ending == "finished"
    assert len(said) == 2 and "training goes on" in said[0] and "5 lines" in said[1]


def test_a_log_that_cannot_be_closed_ends_no_run(tmp_path: Path) -> None:
    said: list[str] = []
    writer = LogWriter(tmp_path / "log.jsonl")
    os.close(writer._fd)
    Journal(writer, said.append).close()
    assert len(said) == 1 and "its last lines may be lost" in said[0]


class Listener:
    def saved(self, step: int, path: str, num_bytes: int, seconds: float, blocked_s: float) -> None:
        assert path == f"checkpoints/step-{step:08d}" and num_bytes > 0 and seconds > 0 and blocked_s > 0

    def not_saved(self, step: int, reason: str) -> None:
        raise AssertionError(reason)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_the_run_at_the_edge_of_the_step(number: signal.Signals, tmp_path: Path) -> None:
    said: list[str] = []
    before = signal.getsignal(number)
    signals = Signals(said.append)
    signals.listen()

    class Sender:
        def observe(self, result: StepResult, state: TrainState) -> None:
            if result.step == 3:
                os.kill(os.getpid(), number)

        def close(self) -> None: ...

    saving = Saving(tmp_path / "checkpoints", SavePolicy(), listener=Listener(), warn=pytest.fail)
    outcome = run(
        make_state(),
        batches(9),
        make_step(loss),
        until=for_steps(9),
        observers=[Sender(), signals],
        saving=saving,
    )
    assert outcome.ending == "stopped" and outcome.step in (3, 4)
    assert outcome.stop is not None and outcome.stop.exit_code == STOPPED_EXIT_CODE
    assert outcome.stop.reason == number.name and number.name in said[0]
    assert saving.last is not None and saving.last.name == f"step-{outcome.step:08d}"
    set_late_handlers(default_handler)
    assert signal.getsignal(number) == before


def test_samples_are_shown_and_kept(tmp_path: Path) -> None:
    said: list[str] = []
    samples = TextSamples(lambda: "once upon", folder=tmp_path / "samples", say=said.append)
    run(make_state(), batches(20), make_step(loss), until=for_steps(20), observers=[samples])
    assert len(said) == 2 and "25%" in said[0] and "50%" in said[1] and "once upon" in said[0]
    assert (tmp_path / "samples/samples.txt").read_text().count("once upon") == 2


def test_a_bad_sample_is_told_and_logged_whether_its_step_is_due_or_not(tmp_path: Path) -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, width=160))
    journal = Journal(LogWriter(tmp_path / "log"), warn=pytest.fail)
    recorder = StepLog(journal, [], Every(steps=5), wall_clock=lambda: 1.0)
    given = batches(4)
    given[2] = replace(given[2], bad=(BadSample(137, "OSError: truncated"), BadSample(5, "ValueError: x")))
    run(make_state(), given, make_step(loss), until=for_steps(4), observers=[recorder, progress])
    journal.close()
    told = [r for r in read(tmp_path / "log").records if isinstance(r, Quarantined)]
    assert [(r.step, r.sample_ids, r.reason) for r in told] == [
        (3, (137,), "OSError: truncated"),
        (3, (5,), "ValueError: x"),
    ]
    assert "sample 137 cannot be read and is left out from now on: OSError: truncated" in out.getvalue()
    assert len(out.getvalue().splitlines()) == 2
