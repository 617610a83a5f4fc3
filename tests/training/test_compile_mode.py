"""A long run compiles its model in the fastest mode of torch.compile, and the measurement leaves no trace."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from trainwright.assembly import assemble
from trainwright.training import compile_mode

pytestmark = [
    pytest.mark.slow,  # torch._dynamo is imported
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),  # of torch's own making
]
OTHER = "max-autotune-no-cudagraphs"


class Noisy(nn.Module):
    """A model with buffers and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


class Compiler:
    """Stands for ``compile_in_place``: the modes compute the same, and some of them slowly or not at all."""

    def __init__(self) -> None:
        self.slow_s: dict[str, float] = {}
        self.broken = ""
        self.calls: list[str] = []

    def __call__(self, model: nn.Module, backend: str = "", mode: str = "auto") -> None:
        def call(*args: object) -> object:
            self.calls.append(mode)
            if mode == self.broken:
                raise RuntimeError("no kernel")
            time.sleep(self.slow_s.get(mode, 0.0))
            return model._call_impl(*args)  # type: ignore[no-untyped-call]

        model._compiled_call_impl = call


@pytest.fixture
def long_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs of a few steps count as long."""
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_mode, "MAX_TRIAL_FRACTION", 1e9)
    monkeypatch.setattr(compile_mode, "MIN_TIMED_S", 0.0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def compiler(long_runs: None, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    for module in (assemble, compile_mode):
        monkeypatch.setattr(module, "compile_in_place", made)
    return made


def fitted(model: nn.Module | None = None, steps: int = 3, resume: Path | None = None, **settings: Any) -> tw.Result:
    torch.manual_seed(0)
    data = (torch.randn(32, 8), torch.randint(3, (32,)))
    more = {"log.doctor": False, "model.compile": True, "model.compile_mode": "auto", **settings}
    loss = nn.CrossEntropyLoss()
    return tw.fit(model or Noisy(), data, loss, steps=steps, quiet=True, settings=more, resume=resume)


def decision(result: tw.Result, name: str = "provenance.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((result.run / name).read_text())["compile"]
    return found


def header(result: tw.Result) -> list[tuple[str, str]]:
    settings = json.loads((result.run / "plan.json").read_text())["header"]["settings"]
    return [(each["value"], each["origin"]) for each in settings if each["name"] == "mode"]


@pytest.mark.parametrize(
    ("slow", "gain", "expected"),
    [("default", 1.03, OTHER), (OTHER, 1.03, "default"), ("default", 1e9, "default")],
    ids=["default slow", "other slow", "within the margin"],
)
def test_the_fastest_mode_trains(
    slow: str, gain: float, expected: str, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "thread_time", time.perf_counter)  # a pause takes no time of the processor
    monkeypatch.setattr(compile_mode, "MIN_GAIN", gain)
    compiler.slow_s = {slow: 0.03}
    result = fitted()
    assert (decision(result)["mode"], compiler.calls[-1]) == (expected, expected)
    assert set(decision(result)["seconds"]) == {"default", OTHER}
    assert header(result) == [(f"{expected} of torch.compile", "planned")]


@pytest.mark.parametrize("mode", ["default", OTHER])
def test_a_mode_in_the_recipe_is_used_without_a_measurement(mode: str, compiler: Compiler) -> None:
    result = fitted(**{"model.compile_mode": mode})
    assert (set(compiler.calls), header(result)) == ({mode}, [])
    assert "compile" not in json.loads((result.run / "provenance.json").read_text())


def test_a_deterministic_run_has_the_default_mode(compiler: Compiler) -> None:
    compiler.slow_s = {"default": 0.03}
    found = decision(fitted(deterministic=True))
    assert (found["mode"], found["seconds"]) == ("default", {})


def test_the_measurement_leaves_no_trace(compiler: Compiler) -> None:
    tried, plain = Noisy(), Noisy()
    plain.load_state_dict(tried.state_dict())
    assert len(decision(fitted(tried))["seconds"]) == 2
    fitted(plain, **{"model.compile": False})
    for name, value in plain.state_dict().items():
        assert torch.equal(value, tried.state_dict()[name]), name


def test_another_run_of_the_model_measures_nothing(compiler: Compiler, tmp_path: Path) -> None:
    first = decision(fitted())
    again = decision(fitted())
    assert (again["key"], again["mode"]) == (first["key"], first["mode"])
    assert (bool(first["seconds"]), again["seconds"]) == (True, {})
    assert decision(fitted(nn.Linear(8, 3)))["key"] != first["key"]
    (tmp_path / "cache" / "compile" / f"{first['key']}.json").write_text('{"compile_mode": "unknown"}')
    assert decision(fitted())["seconds"]


def test_a_resumed_run_keeps_its_mode(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "thread_time", time.perf_counter)
    compiler.slow_s = {"default": 0.03}
    result = fitted()
    (tmp_path / "cache" / "compile" / f"{decision(result)['key']}.json").unlink()
    compiler.slow_s = {OTHER: 0.03}
    resumed = decision(fitted(steps=5, resume=result.run), "provenance-from-step-00000003.json")
    assert (resumed["mode"], resumed["seconds"], resumed["why"]) == (OTHER, {}, "as in the earlier part of the run")


def test_a_mode_that_fails_is_left_out(compiler: Compiler) -> None:
    compiler.broken = OTHER
    found = decision(fitted())
    assert (found["mode"], list(found["seconds"])) == ("default", ["default"])
    assert found["why"].endswith(f"{OTHER} failed: RuntimeError")


def test_a_short_run_measures_nothing(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_mode, "MAX_TRIAL_FRACTION", 0.02)
    found = decision(fitted())
    assert (found["mode"], found["seconds"], compiler.calls) == ("default", {}, ["default"] * 3)


def test_a_model_without_a_dry_run_is_not_measured(compiler: Compiler, tmp_path: Path) -> None:
    class Writing(Noisy):
        def forward(self, x: Tensor) -> Tensor:
            (tmp_path / "written").write_text("x")
            return super().forward(x)

    data, settings = (
        (torch.randn(32, 8), torch.randint(3, (32,))),
        {"log.doctor": False, "model.compile": True, "model.compile_mode": "auto"},
    )
    result = tw.fit(Writing(), data, nn.CrossEntropyLoss(), until="0.2s", quiet=True, settings=settings)
    assert decision(result)["seconds"] == {}


def test_inductor_computes_the_same_bits_after_the_measurement(long_runs: None) -> None:
    tried, fixed = Noisy(), Noisy()
    fixed.load_state_dict(tried.state_dict())
    found = decision(fitted(tried))
    assert set(found["seconds"]) == {"default", OTHER}
    fitted(fixed, **{"model.compile_mode": found["mode"]})
    for name, value in fixed.state_dict().items():
        assert torch.equal(value, tried.state_dict()[name]), name
