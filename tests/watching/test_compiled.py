"""A compiled model is watched without being compiled again, and a step of it is replayed as the model is written."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch._dynamo.utils import counters

import trainwright as tw
from tests.watching.loops import Watching, X, Y, both, exams, net, plain_steps, replays, said, sgd, weights
from trainwright.checkpoint.isolation import not_compiled
from trainwright.runs.reader import read
from trainwright.runs.records import Examined

pytestmark = pytest.mark.filterwarnings(  # of torch's own, while it compiles
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(torch.tanh(self.norm(self.one(x))))
        return out


@pytest.fixture(autouse=True)
def quiet_dynamo(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Dynamo gives up nowhere, and does not warn: of a limit of recompilations, of hooks that it meets."""
    counters.clear()
    yield
    assert not counters["graph_break"]
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def compiled(make: Callable[[Small], Any], *, outside: bool = False) -> Callable[[Watching], list[Any]]:
    """A loop that gives its weights and the number of graphs that were compiled."""

    def loop(watching: Watching) -> list[Any]:
        torch._dynamo.reset()
        counters.clear()
        inner = Small()
        model = make(inner)
        with watching(inner if outside else model, optimizer := sgd(inner)):
            plain_steps(model, optimizer)
        return [*weights(inner), graphs()]

    return loop


def in_place(model: Small, backend: str) -> Small:
    model.compile(backend=backend, fullgraph=True)
    return model


def wrapped(model: Small, backend: str) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True)


def by_parts(model: Small, backend: str) -> Small:
    model.one.compile(backend=backend)
    model.two = torch.compile(model.two, backend=backend)  # type: ignore[assignment]
    return model


@pytest.mark.slow
@pytest.mark.parametrize("make", [wrapped, in_place, by_parts])
def test_a_compiled_model(make: Callable[[Small, str], Any]) -> None:
    watch = both(compiled(lambda inner: make(inner, "aot_eager")))
    assert watch.step == 10
    assert replays(watch)
    assert {values["tolerance"] for values in exams(watch, "again")} == {torch.finfo(torch.float32).eps ** 0.5}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_model_compiled_by_inductor() -> None:
    watch = both(compiled(lambda inner: wrapped(inner, "inductor")))
    assert replays(watch), "the same losses but for the rounding of other kernels"


@pytest.mark.slow
def test_the_inside_of_a_compiled_model() -> None:
    """Its calls are a part of a graph: nothing is compiled otherwise than it was, and nothing is heard."""
    watch = both(compiled(lambda inner: wrapped(inner, "aot_eager"), outside=True))
    assert watch.step == 10
    assert "the loss does not depend on the output of the watched model" in said(watch)


@pytest.mark.slow
def test_a_compiled_loss() -> None:
    def loop(watching: Watching) -> list[Any]:
        torch._dynamo.reset()
        counters.clear()
        model = net()
        optimizer = sgd(model)
        loss = torch.compile(lambda out, y: F.cross_entropy(out * 2, y), backend="aot_eager", fullgraph=True)
        with watching(model, optimizer):
            for _ in range(6):
                optimizer.zero_grad()
                loss(model(X), Y).backward()
                optimizer.step()
        return [*weights(model), graphs()]

    both(loop)


def fitted(model: nn.Module, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """What the replays of a run of our own engine gave."""
    options = {"folder": str(folder), "log.sinks": [], **settings}
    result = tw.fit(
        model, (X, Y), nn.CrossEntropyLoss(), until="12steps", batch=8, precision="fp32", settings=options, quiet=True
    )
    log = read(result.run / "log.jsonl").records
    return [r.values for r in log if isinstance(r, Examined) and r.experiment == "again"]


@pytest.mark.slow
@pytest.mark.parametrize("make", [wrapped, in_place])
def test_a_compiled_model_in_our_own_engine(tmp_path: Path, make: Callable[[Small, str], Any]) -> None:
    torch._dynamo.reset()
    again = fitted(make(Small(), "aot_eager"), tmp_path)
    assert len(again) >= 4 and all(values.get("same_losses") for values in again)
    assert graphs() == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_recipe_that_compiles(tmp_path: Path) -> None:
    torch._dynamo.reset()
    again = fitted(Small(), tmp_path, **{"model.compile": True})
    assert len(again) >= 4 and all(values.get("same_losses") for values in again)


@pytest.mark.slow
def test_a_compiled_step_of_an_optimizer(recwarn: pytest.WarningsRecorder) -> None:
    """The recorder is not compiled with it: no graph more, and no warning of ours is taken for the loop's."""

    def loop(watching: Watching) -> list[Any]:
        torch._dynamo.reset()
        counters.clear()
        model = net()
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
        with watching(model, optimizer):
            plain_steps(model, optimizer)
        made = graphs()
        counters["graph_break"].clear()  # a compiled step has some: the hooks of any optimizer
        return [*weights(model), made]

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        watch = both(loop)
    package = str(Path(tw.__file__).parent)
    assert [each for each in recwarn if package in str(each.message) or each.filename.startswith(package)] == []
    assert watch.step == 10 and [found.code for found in watch.findings()] == []


@pytest.mark.slow
def test_the_dry_run_of_a_compiled_model_runs_it_uncompiled(tmp_path: Path) -> None:
    """Compilation writes files, which a dry run must not do."""
    torch._dynamo.reset()
    model = Small()
    options = {"folder": str(tmp_path), "log.sinks": []}
    result = tw.fit(
        in_place(model, "aot_eager"), (X, Y), nn.CrossEntropyLoss(), until="2steps", settings=options, quiet=True
    )
    plan = json.loads((result.run / "plan.json").read_text())
    assert plan["initial_loss"] is not None, plan


def test_after_replays_of_two_threads_torch_compiles_again() -> None:
    first, second = not_compiled(), not_compiled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert eval_frame._stance.stance == "force_eager"
    second.__exit__(None, None, None)
    assert eval_frame._stance.stance == "default"
