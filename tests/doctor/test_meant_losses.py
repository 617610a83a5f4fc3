"""What looks like a broken law of the function or of the loss, and is meant: no more than an info."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.rows import each_row

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)
IDS = torch.randint(1, 9, (64, 10), generator=torch.Generator().manual_seed(1))
PADDED = IDS * (torch.arange(10) < torch.randint(3, 11, (64, 1), generator=torch.Generator().manual_seed(2)))
Step = Callable[[nn.Module, slice], Tensor]


class Net(nn.Module):
    """``change`` is made of what the first layer gives, for the last."""

    def __init__(self, change: Callable[[Net, Tensor], Tensor] = lambda net, h: h, more: int = 0) -> None:
        super().__init__()
        self.change, self.first, self.last = change, nn.Linear(6, 16), nn.Linear(16 + more, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.given = X

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.change(self, F.relu(self.first(x))))


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(0, 0.5)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Words(nn.Module):
    """Convolutions over ids, and the largest of each; or both ways, or shifted within."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.tokens = kind, nn.Embedding(9, 8, padding_idx=0)
        self.conv, self.on, self.back = (
            nn.Conv1d(8, 8, 3),
            nn.GRU(8, 8, batch_first=True),
            nn.GRU(8, 8, batch_first=True),
        )
        self.head = nn.Linear(8, 9)

    def forward(self, ids: Tensor) -> Any:
        h = self.tokens(ids)
        if self.kind == "conv":
            return self.head(self.conv(h.mT).relu().amax(2))[:, :3]
        if self.kind == "shifted":
            return self.head(self.on(F.pad(h, (0, 0, 1, -1)))[0])
        return self.head(self.on(h)[0]), self.head(self.back(h.flip(1))[0].flip(1))


class Kept(Net):
    """Keeps what derivatives are taken by."""

    def forward(self, x: Tensor) -> Tensor:
        self.given = x.detach().clone().requires_grad_()
        return super().forward(self.given)


class Rate(nn.Module):
    """Reads all places of a row but the last, which the loss alone takes."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(self.cell(x[:, :-1]))


def classes(model: nn.Module, rows: slice) -> Tensor:
    return F.cross_entropy(model(X[rows]), Y[rows])


def pads(model: nn.Module, rows: slice) -> Tensor:
    return F.cross_entropy(model(PADDED[rows]), PADDED[rows, 0] % 3)


def both_ways(model: nn.Module, rows: slice) -> Tensor:
    on, back = model(IDS[rows])
    later, before = (F.cross_entropy(a.flatten(0, 1), b.flatten()) for a, b in (
        (on[:, :-1], IDS[rows, 1:]), (back[:, 1:], IDS[rows, :-1])
    ))  # fmt: skip
    return later + before


def itself(model: nn.Module, rows: slice) -> Tensor:
    return F.cross_entropy(model(IDS[rows]).flatten(0, 1), IDS[rows].flatten())


def slopes(model: nn.Module, rows: slice) -> Tensor:
    """Implicit score matching: a divergence, which may have either sign."""
    x = X[rows, :6].clone().requires_grad_()
    score = model(x)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return slope.sum(1).mean() - 9 * slope[:, :1].mean() + score.square().mean()


def against(model: nn.Module, rows: slice) -> Tensor:
    """A square that is the energy, of data and of noise."""
    noise = torch.randn_like(X[rows])
    return model(X[rows]).square().mean() - model(noise).square().mean()


def of_gaps(model: nn.Module, rows: slice) -> Tensor:
    rates = model(X[rows])
    return (rates * X[rows].abs() - rates.log()).mean() + 0 * X[rows].sum()


def kept(model: nn.Module, rows: slice) -> Tensor:
    out = model(X[rows])
    (slope,) = torch.autograd.grad(out.sum(), model.given, create_graph=True)  # type: ignore[call-overload]
    return F.cross_entropy(out, Y[rows]) + 1e-2 * slope.square().mean()


def densities(model: nn.Module, rows: slice) -> Tensor:
    """Data are told from noise by a density, less that of the noise."""
    noise = torch.randn_like(X[rows])
    own, other = (model(x)[:, 0] - (-x.square().sum(1) / 2 - 5.5) for x in (X[rows], noise))
    return -F.logsigmoid(own).mean() - F.logsigmoid(-other).mean()


def counted(net: Net, h: Tensor) -> Tensor:
    net.seen += 1
    return h


def with_spread(net: Net, h: Tensor) -> Tensor:
    """A statistic of the batch is one feature more."""
    return torch.cat([h, 0.1 * h.std(0).mean().expand(len(h), 1)], 1)


@pytest.mark.slow
@each_row(
    ("model", "step"),
    [
        (lambda: Net(counted), classes),
        (lambda: Net(with_spread, 1), classes),
        (lambda: Net(lambda net, h: Straight.apply(h)), classes),
        (lambda: Words("conv"), pads),
        (lambda: Words("both ways"), both_ways),
        (lambda: Words("shifted"), itself),
        (lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6)), slopes),
        (Net, against),
        (Rate, of_gaps),
        (Kept, kept),
        (Net, densities),
    ],
    ids=str,
)
def test_what_is_meant_is_an_info(model: Callable[[], nn.Module], step: Step) -> None:
    torch.manual_seed(0)
    module = model()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(64)), batch_size=16)
    with tw.watch(module, optimizer, loader=loader, out=None, quiet=True, laws="function") as watch:
        for n in range(12):
            optimizer.zero_grad()
            step(module, slice(16 * (n % 4), 16 * (n % 4) + 16)).backward()
            optimizer.step()
    assert watch.session.failures == []
    families = ("law.function", "loss", "model", "grad.wrong", "grad.graph", "opt.params_not")
    assert not [each for each in watch.findings() if each.severity != "info" and each.code.startswith(families)]
