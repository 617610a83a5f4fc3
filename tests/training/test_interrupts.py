"""Ctrl-C and other signals in ``tw.fit``: saved first, then the script learns that training did not finish."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import trainwright as tw
from trainwright.checkpoint.store import checkpoints
from trainwright.errors import UsageError

pytestmark = pytest.mark.process  # each starts threads that read the machine


def sends(number: int, at: int = 3) -> Callable[[tw.StepResult, tw.TrainState], None]:
    return lambda result, state: os.kill(os.getpid(), number) if result.step == at else None


def fitted(number: int, **more: Any) -> tw.Result:
    torch.manual_seed(0)
    data = torch.randn(64, 4), torch.randint(2, (64,))
    options: dict[str, Any] = {"steps": 6, "quiet": True, "settings": {"log.doctor": False}}
    options |= {"observers": [sends(number)], **more}
    return tw.fit(nn.Linear(4, 2), data, nn.CrossEntropyLoss(), **options)


def saved_steps(run: Path) -> list[str]:
    return [path.name for path in checkpoints(run / "checkpoints")]


def test_ctrl_c_saves_and_raises(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        KeyboardInterrupt, match=r"stopped after step 3; continue it with tw.fit\(..., resume='runs/run'"
    ):
        fitted(signal.SIGINT, quiet=False)
    assert "step-00000003" in saved_steps(Path("runs/run"))
    assert "next     tw.fit(..., resume='runs/run')" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert fitted(signal.SIGINT, observers=[], resume="runs/run").step == 6


def test_where_a_shell_made_a_background_process_ignore_sigint_it_raises_too() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt):
            fitted(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_on_interrupt_return_gives_the_result(name: str) -> None:
    result = fitted(getattr(signal, name), on_interrupt="return")
    assert (result.ending, result.reason, result.step, result.interrupted_by) == ("stopped", name, 3, name)
    assert "step-00000003" in saved_steps(result.run)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_would_end_the_process_ends_it_once_it_is_saved(number: int) -> None:
    with pytest.raises(SystemExit) as ended:
        fitted(number)
    assert ended.value.code == 75 and "step-00000003" in saved_steps(Path("runs/run"))


def test_a_handler_of_the_program_is_called_and_the_program_decides() -> None:
    heard: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        result = fitted(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM] and result.interrupted_by == "SIGTERM"


def test_one_that_comes_in_the_last_evaluation_is_not_swallowed() -> None:
    """The run is finished and saved by then; the script is interrupted all the same."""
    trained: list[int] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if trained[-1:] == [6] and not torch.is_grad_enabled():
            trained.append(7)
            os.kill(os.getpid(), signal.SIGINT)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    data = torch.randn(64, 4), torch.randint(2, (64,))
    options: dict[str, Any] = {"quiet": True, "settings": {"log.doctor": False, "evaluation.every": "4steps"}}
    observers = [lambda result, state: trained.append(result.step)]
    with pytest.raises(KeyboardInterrupt, match="after step 6"):
        tw.fit(nn.Linear(4, 2), data, loss, val=data, steps=6, observers=observers, **options)
    assert trained[-1] == 7 and "step-00000006" in saved_steps(Path("runs/run"))


def test_a_run_that_nobody_interrupts_says_so() -> None:
    result = fitted(signal.SIGINT, observers=[lambda result, state: tw.Stop("SIGINT") if result.step == 2 else None])
    assert (result.ending, result.reason, result.interrupted_by) == ("stopped", "SIGINT", "")
    with pytest.raises(UsageError, match="on_interrupt"):
        fitted(signal.SIGINT, on_interrupt="ignore")


SCRIPT = """
import os, signal, torch, trainwright as tw
from torch import nn
stop = lambda result, state: os.kill(os.getpid(), signal.SIGINT) if result.step == 3 else None
try:
    tw.fit(nn.Linear(4, 2), (torch.randn(64, 4), torch.randint(2, (64,))), nn.CrossEntropyLoss(), steps=50,
           observers=[stop], settings={"log.doctor": False})
    print("predictions are written")
finally:
    print("cleaned up")
"""


@pytest.mark.slow
def test_a_script_does_not_go_on_as_if_it_had_finished() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert "predictions" not in done.stdout and done.stdout.splitlines()[-1] == "cleaned up"
    assert "resume='runs/run'" in done.stdout and "step-00000003" in saved_steps(Path("runs/run"))
    ended = [json.loads(line) for line in Path("runs/run/log.jsonl").read_text().splitlines()][-1]
    assert (ended["kind"], ended["ending"], ended["reason"]) == ("ended", "stopped", "SIGINT")


IN_A_TERMINAL = """\
import time, torch, trainwright as tw

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.ones(4), index % 2

loss = torch.nn.CrossEntropyLoss()
tw.fit(torch.nn.Linear(4, 2), Slow(), loss, steps=4000, batch=4, settings={"log.every": "1steps"})
"""


def test_a_run_whose_terminal_is_closed_is_saved(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(IN_A_TERMINAL)
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        os.execv(sys.executable, [sys.executable, str(tmp_path / "train.py")])
    said = b""
    while b"first loss" not in said:  # from then on it draws a live line
        said += os.read(terminal, 4096)
    os.close(terminal)
    _, status = os.waitpid(process, 0)
    last = json.loads(Path("runs/run/log.jsonl").read_text().splitlines()[-1])
    assert os.waitstatus_to_exitcode(status) == 75
    assert last["reason"] == "SIGHUP" and f"step-{last['step']:08d}" in saved_steps(Path("runs/run"))
