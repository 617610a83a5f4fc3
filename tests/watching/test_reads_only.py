"""Whatever happens to the watch itself, the loop goes on, and what leaves the loop leaves the watch."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def loop(out: Path, *, broken: Callable[[Path], None], at: int = 5, error: Exception | None = None) -> Tensor:
    """Ten steps; ``broken`` is called with the run folder before step ``at``, 0 being before the watch is entered."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = tw.watch(model, optimizer, out=out)
    assert watch.folder is not None
    if at == 0:
        broken(watch.folder.path)
    with watch:
        for step in range(1, 11):
            if step == at:
                broken(watch.folder.path)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,)))
            (loss * (float("nan") if step == 7 else 1.0)).backward()  # a bundle is to be written
            optimizer.step()
        if error is not None:
            raise error
    assert watch.step == 10
    return model.weight.detach().clone()


def full(folder: Path) -> None:
    (folder / "log.jsonl").symlink_to("/dev/full")


@pytest.mark.parametrize(("broken", "at", "why"), [(remove, 5, "was deleted"), (full, 0, "the disk is full")])
def test_a_log_that_cannot_be_written_costs_lines(
    tmp_path: Path, broken: Callable[[Path], None], at: int, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = loop(tmp_path / "whole", broken=lambda folder: None)
    capsys.readouterr()
    assert torch.equal(loop(tmp_path / "run", broken=broken, at=at), whole)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count(why) == 1 and "lines of" in said and "were lost" in said
    assert "1. critical: " in said, "the diagnosis is printed as ever"


def test_the_exception_of_the_loop_comes_out(tmp_path: Path) -> None:
    error = KeyError("of the loop")
    with pytest.raises(KeyError) as caught:
        loop(tmp_path / "run", broken=remove, error=error)
    assert caught.value is error


def test_a_closed_stderr_hides_no_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = KeyError("of the loop")
    with (tmp_path / "stderr").open("w") as closed:
        monkeypatch.setattr(sys, "stderr", closed)
    with pytest.raises(KeyError) as caught:
        loop(tmp_path / "run", broken=lambda folder: None, error=error)
    assert caught.value is error
