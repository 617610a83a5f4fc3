"""``tw.watch(..., like=RUN)``: the same program is quiet, and each changed one is a finding with both values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainwright as tw
from trainwright.errors import UsageError

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second
STEPS = 24


def train(
    out: Path,
    *,
    seed: int = 0,
    like: Path | None = None,
    lr: float = 1e-2,
    clip: bool = True,
    scale: float = 1.0,
    rows: int = 16,
    steps: int = STEPS,
    change: Callable[[nn.Sequential], Any] = lambda model: None,
    loss_of: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    change(model)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr)
    with tw.watch(model, optimizer, out=out, like=like, quiet=True, layers=False) as watch:
        for _ in range(steps):
            x = torch.randn(rows, 8)
            optimizer.zero_grad()
            loss_of(model(scale * x), x[:, :4].argmax(1)).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert watch.session.failures == [] and all(each.code != "doctor.failed" for each in watch.findings())
    return {each.code: each for each in watch.findings() if each.code.startswith("reference.")}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "healthy"
    assert train(out) == {}
    return out


def test_the_same_program_with_another_seed_is_quiet(healthy: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "run", seed=1, like=healthy) == {}


@pytest.mark.parametrize(
    ("changed", "code", "said"),
    [
        ({"clip": False}, "program_differs", "backward step here"),
        (
            {"change": lambda model: model.eval()},
            "program_differs",
            "eval mode: the model here, none in the reference run",
        ),
        ({"loss_of": lambda z, y: F.nll_loss(z.softmax(1), y)}, "program_differs", "nll_loss here"),
        ({"rows": 8}, "program_differs", "rows of a step: 8 here, 16 in the reference run"),
        ({"scale": 0.1}, "program_differs", "standard deviation of an input: 0.09"),
        ({"lr": 1e-3}, "course_differs", "learning rate at step 1: 0.001 here, 0.01 in the reference run"),
        ({"change": lambda model: model[0].weight.data.mul_(50)}, "course_differs", "mean loss of the first 8"),
        (
            {"change": lambda model: model[0].requires_grad_(False)},
            "program_differs",
            "of the optimizers: 2 here",
        ),
    ],
)
def test_a_difference_is_found(healthy: Path, tmp_path: Path, changed: dict[str, Any], code: str, said: str) -> None:
    found = train(tmp_path / "run", like=healthy, **changed)
    assert said in found[f"reference.{code}"].symptom
    assert all(each.expected is not None for each in found[f"reference.{code}"].evidence)


def test_a_cut_graph_is_found(healthy: Path, tmp_path: Path) -> None:
    def cut(model: nn.Sequential) -> None:
        model[0].register_forward_hook(lambda module, args, out: out.detach())

    found = train(tmp_path / "run", like=healthy, change=cut)
    assert found["reference.program_differs"].symptom.startswith("weights that have changed: 2 here, 4 in")


def test_a_reference_without_steps_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "short", steps=3)
    with pytest.raises(UsageError, match="has records of 3 steps"):
        train(tmp_path / "run", like=tmp_path / "short")
    with pytest.raises(UsageError):
        train(tmp_path / "run", like=tmp_path / "none")
