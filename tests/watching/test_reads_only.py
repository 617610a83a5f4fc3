"""Whatever happens to the watch itself, the loop goes on, and what leaves the loop leaves the watch."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from trainwright.errors import UsageError
from trainwright.runlog.reader import read
from trainwright.runlog.records import Ended, Watched


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def loop(out: Path, *, broken: Callable[[Path], None], error: Exception | None = None) -> Tensor:
    """Ten steps; ``broken`` is called with the run folder before the fifth."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = tw.watch(model, optimizer, out=out)
    assert watch.folder is not None
    with watch:
        for step in range(1, 11):
            if step == 5:
                broken(watch.folder.path)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,)))
            (loss * (float("nan") if step == 7 else 1.0)).backward()  # a bundle is to be written
            optimizer.step()
        if error is not None:
            raise error
    assert watch.step == 10
    return model.weight.detach().clone()


@pytest.fixture
def file_size() -> Iterator[None]:
    """The limit of the size of files is afterwards what it was."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill(folder: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((folder / "log.jsonl").stat().st_size, most))


@pytest.mark.slow
@pytest.mark.usefixtures("file_size")
@pytest.mark.parametrize(("broken", "why"), [(remove, "was deleted"), (fill, "would exceed the size limit")])
def test_a_log_that_cannot_be_written_costs_lines(
    tmp_path: Path, broken: Callable[[Path], None], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = loop(tmp_path / "whole", broken=lambda folder: None)
    capsys.readouterr()
    assert torch.equal(loop(tmp_path / "run", broken=broken), whole)
    err = capsys.readouterr().err
    said = " ".join(err.split())
    assert sum(why in line and "log.jsonl" in line for line in err.splitlines()) == 1, err
    assert "lines of" in said and "were lost" in said
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


def forked(model: nn.Module, optimizer: torch.optim.Optimizer, leave: Callable[[], None]) -> int:
    """Trains three steps in a fork of this process, which then calls ``leave``. Returns its exit status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        steps(model, optimizer, 3)
        leave()
    finally:
        os._exit(0)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
        optimizer.step()


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_is_not_watched(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It may train on and leave the ``with``: the log is of the process that was watched, and so is what is printed."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = tw.watch(model, optimizer, out=tmp_path / "run")
    plain = torch.autograd.backward
    with watch:
        steps(model, optimizer, 2)
        model(torch.randn(8, 4))  # no backward pass follows: the tape runs
        assert forked(model, optimizer, lambda: watch.__exit__(None, None, None)) == 0
        steps(model, optimizer, 2)
    log = read(tmp_path / "run/log.jsonl").records
    assert [r.step for r in log if isinstance(r, Watched)] == [1, 2, 3, 4]
    assert len([r for r in log if isinstance(r, Ended)]) == 1
    assert capfd.readouterr().err.count("diagnosis:") == 1
    assert torch.autograd.backward is plain


def test_a_watch_of_nothing_is_refused() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for arguments, what in (([[], [optimizer]], "no model"), ([model, []], "no optimizer"), ([[], []], "no model")):
        with pytest.raises(UsageError, match=what) as caught:
            tw.watch(*arguments, out=None)
        assert caught.value.remedy


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [lambda m: torch.jit.trace(m, torch.randn(8, 4)), torch.jit.script])
def test_a_model_of_torch_jit(make: Callable[[nn.Module], nn.Module]) -> None:
    """It is refused whole. As a part of a model it is watched, and nothing is replayed."""
    part = make(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with pytest.raises(UsageError, match=r"torch\.jit") as caught:
        tw.watch(part, torch.optim.SGD(part.parameters(), 0.1), out=None)
    assert "the module that it was made from" in caught.value.remedy
    with pytest.raises(UsageError, match=r"torch\.jit"):
        tw.fit(part, (torch.randn(8, 4), torch.randint(3, (8,))), nn.CrossEntropyLoss())
    model = nn.Sequential(part, nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        steps(model, optimizer, 6)
    assert watch.step == 6 and watch.session.failures == []
    assert [found.code for found in watch.findings()] == ["loop.unseen"] and "torch.jit" in watch.findings()[0].symptom


class Warns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("of the model", stacklevel=1)
        out: Tensor = self.linear(x)
        return out


@pytest.mark.parametrize("how", ["watch", "fit"])
def test_the_warnings_of_a_loop_are_shown_once(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often its steps are replayed, and however many findings have their line read from its source."""
    shown: list[tuple[str, str]] = []
    model, loss, x, y = Warns(), nn.MSELoss(), torch.randn(64, 4), torch.randn(64)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        monkeypatch.setattr(
            warnings, "showwarning", lambda message, _, filename, *rest: shown.append((str(message), filename))
        )
        if how == "fit":
            settings = {"folder": str(tmp_path), "log.sinks": []}
            tw.fit(model, (x, y), loss, until="16steps", batch=16, precision="fp32", settings=settings, quiet=True)
        else:
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            with tw.watch(model, optimizer, out=None, quiet=True) as watch:
                for _ in range(16):
                    optimizer.zero_grad()
                    loss(model(x), y).backward()
                    optimizer.step()
            assert [found.code for found in watch.findings()] == ["loss.broadcast_target"]
    assert [message.partition(" (")[0] for message, _ in shown] == ["of the model", "Using a target size"]
    package = str(Path(tw.__file__).parent)
    assert not any(filename.startswith(package) for _, filename in shown)
