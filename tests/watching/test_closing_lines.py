"""The last lines of a watch: what was examined, what could not be, the verdict, and where its page is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trainwright as tw
from tests.watching.loops import X, Y, net, sgd
from trainwright.recorder.recording import LONGEST

Captured = pytest.CaptureFixture[str]


def lines_of(capsys: Captured, *, steps: int = 20, planted: bool = False, **options: Any) -> list[str]:
    """What a watched loop prints."""
    torch.manual_seed(0)
    model = net()
    optimizer = sgd(model)
    with tw.watch(model, optimizer, **options):
        for _ in range(steps):
            rows = torch.randperm(32)[:8]
            optimizer.zero_grad()
            logits = model(X[rows])
            F.cross_entropy(logits.softmax(1) if planted else logits, Y[rows]).backward()
            optimizer.step()
    return capsys.readouterr().err.splitlines()


@pytest.mark.slow
def test_nothing_found_is_said_with_what_was_examined(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "run"
    found, examined, verdict, run, page = lines_of(capsys, out=out)
    assert found == "diagnosis: nothing found"
    numbers = re.fullmatch(
        r"examined  20 recorded steps, (\d+) of them replayed; (\d+) checks passed \((.+)\), \d+ do not apply, "
        r"\d+ had nothing to examine",
        examined,
    )
    assert numbers and int(numbers[1]) > 3 and int(numbers[2]) > 10
    kinds = {kind: int(count) for kind, count in re.findall(r"(\w+) (\d+)", numbers[3])}
    assert {"gradient", "loss", "optim"} <= kinds.keys() and sum(kinds.values()) == int(numbers[2])
    assert verdict.startswith("verdict: finished without a finding: training loss ")
    assert run.split() == ["run", str(out)]
    assert page.split() == ["page", "trainwright", "serve", str(out), "#", "or", "open", str(out / "report.html")]
    assert (out / "report.html").is_file()


@pytest.mark.slow
def test_without_a_folder_there_is_no_page(capsys: Captured) -> None:
    assert [line.split()[0] for line in lines_of(capsys, out=None)] == ["diagnosis:", "examined", "verdict:"]


@pytest.mark.slow
def test_a_finding_is_followed_by_the_same_lines(tmp_path: Path, capsys: Captured) -> None:
    said = [line for line in lines_of(capsys, out=tmp_path / "run", planted=True) if "examining" not in line]
    assert said[0].startswith("diagnosis: ") and "1. critical: loss.softmax_before_cross_entropy" in said[1]
    assert [line.split()[0] for line in said[-5:]] == ["more:", "examined", "verdict:", "run", "page"]
    explained = "more: trainwright explain loss.softmax_before_cross_entropy"
    assert said[-5] == f"{explained}; trainwright diagnose {tmp_path / 'run'}"


def test_checks_that_need_no_replay(capsys: Captured) -> None:
    _, examined, *others = lines_of(capsys, out=None, examine="listen")
    assert "none of them replayed" in examined and not any("not examined" in line for line in others)


def test_a_loop_without_a_step_has_no_loss(capsys: Captured) -> None:
    said = "\n".join(lines_of(capsys, steps=0, out=None))
    assert "examined  0 recorded steps" in said and "no loss was measured" in said


@pytest.mark.slow
def test_a_quiet_watch_prints_nothing(capsys: Captured) -> None:
    assert lines_of(capsys, out=None, quiet=True) == []


class Scaled(torch.autograd.Function):
    """Multiplies a loss by an array of NumPy."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, by: Any) -> torch.Tensor:
        ctx.by = float(by[0])
        return loss * ctx.by

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.by, None


def test_a_replay_that_always_fails_is_said_with_the_reason(capsys: Captured) -> None:
    model = net()
    optimizer = sgd(model)
    with tw.watch(model, optimizer, out=None):
        for _ in range(6):
            optimizer.zero_grad()
            Scaled.apply(F.cross_entropy(model(X), Y), np.full(1, 2.0)).backward()  # the array is new in each step
            optimizer.step()
    said = capsys.readouterr().err
    assert "none of them replayed" in said
    assert re.search(
        r"^not replayed  6 of 6 recorded steps: ndarray has state that was not kept", said, re.MULTILINE
    ), said


@pytest.mark.slow
def test_a_loop_without_a_backward_pass_has_not_diverged(capsys: Captured) -> None:
    model = net()
    optimizer = sgd(model)
    with tw.watch(model, optimizer, out=None):
        for _ in range(8):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
    assert "verdict: finished without a warning: no loss was measured" in capsys.readouterr().err.splitlines()


@pytest.mark.slow
def test_a_step_of_too_many_operations_is_not_replayed(capsys: Captured) -> None:
    model = nn.Linear(X.shape[1], 1)
    optimizer = sgd(model)
    with tw.watch(model, optimizer, out=None):
        loss = torch.stack([(model(X[0]) + 1).square() for _ in range(LONGEST // 2)]).mean()
        loss.backward()
        optimizer.step()
    said = capsys.readouterr().err.splitlines()
    assert "not replayed  1 of 1 recorded steps: a step has more than 4,096 operations" in said
