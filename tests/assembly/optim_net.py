"""A small network with parameters of many shapes, and its training, for the tests of the optimizers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

STEPS = 20
LR, DECAY = 0.03, 0.1


class Net(nn.Module):
    """A convolution, tall, wide and square matrices, a norm and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.conv = nn.Conv1d(6, 4, 3, padding=1)
        self.up = nn.Linear(4, 12)
        self.down = nn.Linear(12, 4, bias=False)
        self.mix = nn.Linear(4, 4, bias=False)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BDT = self.conv(self.embedding(ids_BT).mT)
        x_BTD = x_BDT.mT + self.mix(self.down(self.up(x_BDT.mT).relu()))
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


def net(dtype: torch.dtype = torch.float64, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def fill_grads(model: nn.Module, step: int, poison: float | None = None) -> None:
    """Computes the gradients on the batch of ``step``. ``poison`` replaces one element of each gradient."""
    ids = torch.randint(0, 7, (5, 9), generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    if poison is not None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.view(-1)[0] = poison


def train(model: nn.Module, optimizer: Optimizer, steps: range = range(STEPS)) -> list[Tensor]:
    for step in steps:
        fill_grads(model, step)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_near(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=tolerance, atol=tolerance)
