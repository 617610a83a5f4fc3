"""Losses and models that do more than one forward pass: the same bits as a loop written by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD

from tests.engine.plain import assert_same_bits, bits, cut, train
from trainwright.models.gpt import gpt

Batch = tuple[Tensor, Tensor]


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


class Branching(nn.Module):
    """if, for and recursion on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.leaf = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        for _ in range(int(x.sum().abs()) % 3):
            x = torch.tanh(self.left(x))
        if depth < 3 and float(x.detach().mean()) > -0.2:
            return self.forward(self.right(x), depth + 1)
        out: Tensor = self.leaf(x)
        return out


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 7), nn.Linear(7, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.embed(ids)))
        return out


def gradient_penalty(model: nn.Module, batch: Batch) -> Tensor:
    """WGAN-GP (Gulrajani et al. 2017)."""
    x = batch[0].clone().requires_grad_()
    score = model(x)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return score.mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()


def maml(model: nn.Module, batch: Batch) -> Tensor:
    """One inner step whose own gradient is differentiated (Finn et al. 2017)."""
    x, y = batch
    weights = dict(model.named_parameters())
    inner = F.mse_loss(functional_call(model, weights, (x[::2],)), y[::2, :1])
    slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    adapted = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
    return F.mse_loss(functional_call(model, adapted, (x[1::2],)), y[1::2, :1])


def regression(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1][:, :1])


def next_id(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def real(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)


def ids(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(7, (8, 5), generator=generator), torch.randint(7, (8, 5), generator=generator)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Batch], Tensor], Callable[[int], Batch]]] = {
    "gradient penalty": (Critic, gradient_penalty, real),
    "maml": (Critic, maml, real),
    "control flow": (Branching, regression, real),
    "tied weights": (Tied, next_id, ids),
    "tied gpt": (lambda: gpt(vocab_size=7, block_size=5, layers=1, heads=1, d_model=8), next_id, ids),
}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_by_hand(case: str, accumulation: int) -> None:
    make, loss, data = CASES[case]
    torch.manual_seed(0)
    ours = make()
    torch.manual_seed(0)
    plain = make()
    start = bits(ours)
    optimizer = SGD(plain.parameters(), lr=0.05, momentum=0.9)
    micro = 8 // accumulation
    for step in range(8):
        batch = data(step)
        optimizer.zero_grad()
        for at in range(0, 8, micro):
            (loss(plain, (batch[0][at : at + micro], batch[1][at : at + micro])) / accumulation).backward()
        optimizer.step()
    train(ours, SGD(ours.parameters(), lr=0.05, momentum=0.9), loss, [cut(data(step), micro) for step in range(8)])
    assert_same_bits(bits(ours), bits(plain))
    assert all(not torch.equal(start[name], after) for name, after in bits(ours).items() if name.endswith("weight"))
