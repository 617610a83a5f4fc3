"""Whatever happens to the watch itself, the loop goes on, and what leaves the loop leaves the watch."""

from __future__ import annotations

import copy
import io
import logging
import os
import pickle
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
from trainwright.runs.reader import read
from trainwright.runs.records import Ended, Watched


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


@pytest.mark.parametrize("is_closed", [True, False], ids=["stderr closed", "folder removed"])
def test_the_exception_of_the_loop_comes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_closed: bool) -> None:
    error = KeyError("of the loop")
    with (tmp_path / "stderr").open("w") as closed:
        monkeypatch.setattr(sys, "stderr", closed if is_closed else sys.stderr)
    with pytest.raises(KeyError) as caught:
        loop(tmp_path / "run", broken=(lambda folder: None) if is_closed else remove, error=error)
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


def test_what_the_loop_replaces_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the next watch, in which nothing is recorded twice."""
    monkeypatch.setattr(Tensor, "backward", Tensor.backward)  # both are put back at the end of the test
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    before = Tensor.backward
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tw.watch(model, optimizer, out=None, quiet=True):
        inner = Tensor.backward

        def backward(self: Tensor, *args: object) -> None:
            inner(self, *args)  # type: ignore[no-untyped-call]

        Tensor.backward = backward  # type: ignore[assignment, method-assign]
        logging.captureWarnings(True)
        shown = warnings.showwarning
        steps(model, optimizer, 2)
    assert Tensor.backward is backward and warnings.showwarning is shown
    assert torch.autograd.backward.__module__ == "torch.autograd" and "zero_grad" in vars(torch.optim.Optimizer)
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        assert Tensor.backward is backward
        steps(model, optimizer, 2)
    events = [kind for record in watch.records if isinstance(record, Watched) for kind, _ in record.events]
    assert events.count("backward") == events.count("zero_grad") == 2
    logging.captureWarnings(False)
    assert Tensor.backward is backward and before is not backward


class WithState(nn.Linear):
    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "of_the_class": True}


@pytest.mark.parametrize("make", [nn.Linear, WithState])
def test_what_is_saved_or_copied_has_no_hooks_of_the_watch(make: type[nn.Linear]) -> None:
    model = nn.Sequential(make(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].register_forward_hook(own_hook)
    optimizer = torch.optim.Adam(model.parameters())
    with tw.watch(model, optimizer, out=None, quiet=True):
        steps(model, optimizer, 2)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        with torch.serialization.safe_globals([nn.Sequential, nn.ReLU, nn.Linear, make, set, own_hook]):
            loaded = torch.load(file, weights_only=True)
        made = [loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        copied = copy.deepcopy(optimizer)
    assert "__reduce_ex__" not in vars(nn.Module)
    assert not copied._optimizer_step_pre_hooks and not copied._optimizer_step_post_hooks
    for each in made:
        hooks = {
            f"{path}.{name}": list(value.values())
            for path, module in each.named_modules()
            for name, value in vars(module).items()
            if "hook" in name and value
        }
        assert hooks == {"0._forward_hooks": [own_hook]}


def own_hook(module: nn.Module, args: object, out: Tensor) -> None: ...


class Logs(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with Path(os.devnull).open("w") as file:
            file.write("x")
        return super().forward(x)


class Iterates(nn.Linear):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.numbers = iter(range(100))


@pytest.mark.parametrize(
    ("make", "why"), [(Logs, "it opens a file to write"), (Iterates, "Iterates.numbers is an iterator")]
)
def test_what_cannot_be_put_back_ends_replays_with_one_line(
    make: type[nn.Linear], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tw.watch(model, optimizer, out=None) as watch:
        steps(model, optimizer, 6)
    lines = [line for line in capsys.readouterr().err.splitlines() if "no step of this run is replayed" in line]
    assert lines == [f"watch: no step of this run is replayed: {why}"]
    (found,) = [each for each in watch.findings() if each.code == "loop.unseen"]
    assert why in found.symptom


class Warns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("of the model", stacklevel=1)
        out: Tensor = self.linear(x)
        return out


@pytest.mark.slow
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
