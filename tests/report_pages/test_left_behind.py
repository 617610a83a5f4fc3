"""Every run leaves its report: one that ends well, one that fails, a loop of somebody else; and none fails for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import trainwright as tw

Observers = Sequence[Callable[[tw.StepResult, tw.TrainState], None]]


def fit(root: Path, loss: nn.Module, *, observers: Observers = ()) -> Path:
    """Trains 3 steps; the run folder."""
    data = (torch.randn(32, 4), torch.randn(32, 1))
    settings = {"folder": str(root), "log.doctor": False}
    result = tw.fit(
        nn.Linear(4, 1),
        data,
        loss,
        until="3steps",
        batch=8,
        name="run",
        settings=settings,
        observers=observers,
        quiet=True,
    )
    return result.run


class Breaks(nn.MSELoss):
    """A loss that fails once it ``is_broken``."""

    is_broken = False

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.is_broken:
            raise RuntimeError("<b>out of luck</b>")
        return super().forward(output, target)


@pytest.mark.slow
def test_a_run_leaves_its_report(tmp_path: Path) -> None:
    run = fit(tmp_path, nn.MSELoss())
    text = (run / "report.html").read_text()
    assert "finished" in text and "3 of 3" in text and '"step":[1,3]' in text
    assert not list(run.glob(".*"))


@pytest.mark.slow
def test_a_run_that_fails_leaves_its_report(tmp_path: Path) -> None:
    loss = Breaks()
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, loss, observers=[lambda result, state: setattr(loss, "is_broken", True)])
    text = (tmp_path / "run" / "report.html").read_text()
    assert "failed" in text and "&lt;b&gt;out of luck" in text


def test_a_watched_loop_leaves_its_report_and_none_without_a_folder(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for out in (tmp_path / "loop", None):
        with tw.watch(model, optimizer, out=out, quiet=True, examine="listen"):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(4, 3)).square().mean().backward()
                optimizer.step()
    text = (tmp_path / "loop" / "report.html").read_text()
    assert "finished" in text and '"step":[1,2,3]' in text
    assert [path.name for path in tmp_path.iterdir()] == ["loop"]
