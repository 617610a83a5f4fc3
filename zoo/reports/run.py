"""Runs one case in a new process, or in several that form a gloo group."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import redirect_stdout
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Literal

import torch
from torch import distributed, nn

from zoo.reports.case import Case, Outcome
from zoo.reports.judge import Row, judge
from zoo.reports.watches import Alarm, JudgedWatch, NullWatch, TrainwrightWatch, merged

WatchName = Literal["null", "trainwright"]
TIME_LIMIT_S = 180
COLLECTIVE_TIME_LIMIT_S = 60
FORK = multiprocessing.get_context("fork")  # so that only the parent has to import torch


def warm_up() -> None:
    """Make PyTorch do the lazy imports of a first optimizer; called before processes are forked."""
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


def run_here(case: Case, watch: JudgedWatch, seed: int, *, faulty: bool) -> tuple[Outcome, list[Alarm]]:
    """Run a program in this process; hides its prints and warnings."""
    torch.manual_seed(seed)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        outcome = case.run(watch, seed, faulty=faulty)
    return outcome, watch.alarms()


def run_apart(case: Case, watch: WatchName, seed: int, *, faulty: bool) -> Row:
    """Run a program in ``case.ranks`` processes and score the findings of all ranks; the outcome is rank 0's."""
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="reports-", ignore_cleanup_errors=True) as folder:
        processes: list[ForkProcess] = []
        results: list[Connection] = []
        for rank in range(case.ranks):
            receiver, sender = FORK.Pipe(duplex=False)
            process = FORK.Process(target=_child, args=(case, watch, seed, faulty, rank, Path(folder), sender))
            process.start()
            sender.close()
            processes.append(process)
            results.append(receiver)
        received = [_receive(result, start_s + TIME_LIMIT_S) for result in results]
        for process in processes:
            process.join(5)
            if process.is_alive():
                assert process.pid is not None
                os.killpg(process.pid, signal.SIGKILL)
                process.join()
    seconds = time.perf_counter() - start_s
    errors = [each for each in received if isinstance(each, str)]
    if errors:
        return Row(case, seed, faulty, seconds, error=errors[0])
    done = [each for each in received if not isinstance(each, str)]
    alarms = merged([found for _, found in done])
    outcome = done[0][0]
    verdict = judge(case, outcome, alarms, faulty=faulty) if watch != "null" else None
    return Row(case, seed, faulty, seconds, outcome, verdict, tuple(alarms))


def _receive(result: Connection, deadline_s: float) -> tuple[Outcome, list[Alarm]] | str:
    if not wait([result], max(0.0, deadline_s - time.perf_counter())):
        return f"not finished after {TIME_LIMIT_S} s"
    try:
        received: tuple[Outcome, list[Alarm]] | str = result.recv()
    except EOFError:
        return "the process ended without a result"
    return received


def _child(case: Case, watch: WatchName, seed: int, faulty: bool, rank: int, folder: Path, sender: Connection) -> None:
    os.setsid()  # a process group, so that ``killpg`` also ends the loader workers of a program that hangs
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, sys.stderr.fileno())
    torch.set_num_threads(1)
    judged = NullWatch() if watch == "null" else TrainwrightWatch(folder / f"rank-{rank}")
    try:
        if case.ranks > 1:
            store = f"file://{folder / 'store'}"
            limit = timedelta(seconds=COLLECTIVE_TIME_LIMIT_S)
            distributed.init_process_group("gloo", store, rank=rank, world_size=case.ranks, timeout=limit)
        sender.send(run_here(case, judged, seed, faulty=faulty))
        if case.ranks > 1:
            distributed.destroy_process_group()
    except Exception:
        sender.send(traceback.format_exc(limit=-4))
    sender.close()
