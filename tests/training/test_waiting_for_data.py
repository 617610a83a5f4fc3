"""Runs that wait for data in vain: a signal is answered at once, a time-out names the sample, and both are saved."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.training.processes import invoke, start, wait_for_file, wait_for_step

pytestmark = [pytest.mark.process, pytest.mark.slow]

STALLING = """\
import os, time
import torch

class Stalling(torch.utils.data.Dataset):  # not before the run: its looks at the data would wait for it too
    def __len__(self):
        return 96

    def __getitem__(self, index):
        while index == 84 and os.path.exists("stall") and os.path.exists("runs/stalled/log.jsonl"):
            open("reading", "w").close()
            time.sleep(0.01)
        return torch.linspace(0, index, 12) / 96 + 0.1 * torch.randn(12), index % 3
"""
RECIPE = """\
name: stalled
until: 15steps
precision: fp32
model: {use: mlp, args: {sizes: [12, 24, 3], dropout: 0.2}}
data: {train: {use: "stalling:Stalling"}, shuffle: false}
batch: {size: 8, micro: 4}
checkpoint: {every: 100steps}
log: {every: 1steps, doctor: false}
"""
LAST = 10  # sample 84 belongs to step 11: beyond what is read ahead to time the workers


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("stalling", None)
    (tmp_path / "stalling.py").write_text(STALLING)
    (tmp_path / "run.yaml").write_text(RECIPE)
    return tmp_path


def weights(run: Path, step: int) -> dict[str, bytes]:
    tensors = load_file(run / f"checkpoints/step-{step:08d}/model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_signal_while_data_is_awaited_saves_at_once(folder: Path, workers: int) -> None:
    code, output = invoke("train", "run.yaml", "--set", "name=straight")
    assert code == 0, output
    (folder / "stall").touch()
    run = folder / "runs/stalled"
    training = start("train", "run.yaml", "--set", f"data.workers={workers}", cwd=folder)
    wait_for_step(run / "log.jsonl", LAST)
    wait_for_file(folder / "reading")
    time.sleep(0.5)  # workers read ahead: now the run waits for them
    training.send_signal(signal.SIGTERM)
    said = training.communicate(timeout=120)[0]  # the data would never come
    assert training.returncode == 75, said
    assert "SIGTERM: saving now, while no step is in progress" in said
    (folder / "stall").unlink()
    code, output = invoke("resume", str(run), "--set", "data.workers=0")
    assert code == 0, output
    assert weights(run, 15) == weights(folder / "runs/straight", 15)


def test_a_worker_that_hangs_ends_the_run_when_its_time_is_over(folder: Path) -> None:
    (folder / "stall").touch()
    training = start("train", "run.yaml", "--set", "data.workers=2", "--set", "data.timeout=4s", cwd=folder)
    said = " ".join(training.communicate(timeout=120)[0].split())
    assert training.returncode == 1, said
    assert "no data came for 4 s: a worker is still reading sample 84" in said and "data.quarantine" in said
    assert (folder / f"runs/stalled/checkpoints/step-{LAST:08d}").is_dir()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_before_the_first_step_ends_the_run_at_once(folder: Path, number: signal.Signals, code: int) -> None:
    source = STALLING.replace('index == 84 and os.path.exists("stall") and', "index == 0 or")
    (folder / "stalling.py").write_text(source)
    training = start("train", "run.yaml", cwd=folder)
    wait_for_file(folder / "reading")
    training.send_signal(number)
    said = training.communicate(timeout=120)[0]
    assert training.returncode == code, said
    assert "Traceback" not in said
    assert number is signal.SIGINT or "nothing was trained or saved" in said
    assert not (folder / "runs/stalled").exists()


DYING = """\
import os, signal
import torch

class Dying(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        if index == 0 or (index == 60 and HERE):
            HOW
        return torch.linspace(0, index, 12) / 96, index % 3
"""


@pytest.mark.parametrize("micro", ["4", "auto"])
def test_a_sample_that_ends_its_process_ends_no_run_without_a_word(folder: Path, micro: str) -> None:
    """Neither before the first step nor, with workers, in it."""
    (folder / "stalling.py").write_text(
        DYING.replace("Dying", "Stalling").replace("HOW", "os._exit(7)").replace("HERE", "False")
    )
    options = ["--set", f"batch.micro={micro}"]
    code, output = invoke("train", "run.yaml", *options)
    assert code == 1, output
    assert "ended with exit code 7 while it read sample 0" in output and "data.quarantine: [0]" in output
    source = DYING.replace("Dying", "Stalling").replace("HERE", "torch.utils.data.get_worker_info()")
    (folder / "stalling.py").write_text(source.replace("HOW", "os._exit(7)"))
    sys.modules.pop("stalling")
    code, output = invoke("train", "run.yaml", *options, "--set", "data.quarantine=[0]", "--set", "data.workers=1")
    assert code == 1, output
    assert "ended with exit code 7 while it read sample 60" in output


def test_a_crash_in_the_training_process_says_where(folder: Path) -> None:
    source = DYING.replace("Dying", "Stalling").replace("index == 0 or ", "").replace("HERE", "os.getpid() == MAIN")
    source = source.replace("HOW", "os.kill(os.getpid(), signal.SIGSEGV)") + "\nMAIN = os.getpid()\n"
    (folder / "stalling.py").write_text(source)
    training = start("train", "run.yaml", cwd=folder)
    said = training.communicate(timeout=120)[0]
    assert training.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in said and "stalling.py" in said and "in __getitem__" in said
