"""Key points of mirrored images: exchanged with their partner, or left with the wrong name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import trainwright as tw
from tests.doctor.checks.data.loops import exam, is_not_applicable, said
from trainwright.doctor.checks.data.mirrored_without_swap import mirrored_without_swap
from trainwright.doctor.facts.data import SamplesFacts


def test_mirrored_samples_and_an_order_of_points() -> None:
    facts = {"mirrored": 6, "ordered": 1, "evaluated": 64}
    assert said(mirrored_without_swap, exam(1, SamplesFacts(**facts))) == ["warning"]
    assert not said(mirrored_without_swap, exam(1, SamplesFacts(**facts | {"ordered": 0})))
    assert is_not_applicable(mirrored_without_swap, exam(1, SamplesFacts(**facts | {"evaluated": 0})))


class Shoulders(Dataset[tuple[Tensor, Tensor]]):
    """A head and two shoulders. ``faces``: people may be seen from the back, so either shoulder may be on the right."""

    def __init__(self, rows: int, *, is_training: bool, swaps: bool, faces: bool) -> None:
        head = torch.rand(rows, 2)
        wide = torch.tensor([0.2, 0.0]) * (torch.randint(2, (rows, 1)) * 2 - 1 if faces else 1)
        self.points = torch.stack([head, head + wide, head - wide], 1)
        self.is_training, self.swaps = is_training, swaps

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        points = self.points[index].clone()
        if self.is_training and torch.rand(()) < 0.5:
            points[:, 0] = 1 - points[:, 0]
            points = points[[0, 2, 1]] if self.swaps else points
        return points.sum() + torch.randn(8), points.flatten()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("swaps", "faces", "expected"),
    [(False, False, True), (True, False, False), (False, True, False)],
    ids=["not exchanged", "exchanged", "no fixed order"],
)
def test_loaders(swaps: bool, faces: bool, expected: bool) -> None:
    torch.manual_seed(0)
    train, val = (Shoulders(64, is_training=each, swaps=swaps, faces=faces) for each in (True, False))
    model = nn.Linear(8, 6)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for _ in range(3):
            for x, y in DataLoader(train, 16, shuffle=True):
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
            with torch.no_grad():
                for x, y in DataLoader(val, 16):
                    F.mse_loss(model(x), y)
    assert watch.session.failures == []
    assert ("data.mirrored_without_swap" in {each.code for each in watch.findings()}) is expected
