"""Lines of findings in a run of ``tw.fit``: always in the user's file, never in this package."""

from pathlib import Path

import pytest
import torch
from torch import nn

import trainwright as tw
from trainwright.runs.records import Found
from trainwright.watching import places

X, Y = torch.randn(64, 6, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 3


class OnlyHere(torch.optim.RAdam):
    """No other file of the tests makes one."""


def _found(folder: Path, x: torch.Tensor, *, is_all_trained: bool) -> tuple[Found, ...]:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = OnlyHere((model if is_all_trained else model[2:]).parameters(), 1e-3)
    settings = {"folder": str(folder)}
    fit = tw.fit(model, (x, Y), nn.CrossEntropyLoss(), optimizer=optimizer, steps=40, quiet=True, settings=settings)
    return fit.findings


@pytest.mark.slow
def test_parameters_in_no_optimizer_are_placed_at_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "MAX_FILES", 0)  # of a program with many modules, the file of the call is read first
    (found,) = [each for each in _found(tmp_path, X, is_all_trained=False) if each.code == "optim.params_missing"]
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    file, _, line = str(found.where.source).partition(":")
    assert file == Path(__file__).name and "= OnlyHere(" in lines[int(line) - 1]


@pytest.mark.slow
def test_a_sample_that_is_not_finite_is_placed_at_the_call_of_fit(tmp_path: Path) -> None:
    x = X.clone()
    x[5, 3] = torch.nan
    (found,) = [each for each in _found(tmp_path, x, is_all_trained=True) if each.code == "data.nonfinite_input"]
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    file, _, line = str(found.where.source).partition(":")
    assert file == Path(__file__).name and "tw.fit(" in lines[int(line) - 1]
