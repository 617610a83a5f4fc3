"""Legal techniques whose gradient is no derivative of the loss, or is none at all: choices, codes, grids, gates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.programs.places import behind_first
from zoo.programs.training import Training


class Codebook(nn.Module):
    """Each row is replaced by the nearest of 32 codes; the gradient passes. ``pull`` keeps rows near their codes."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(32, features))
        self.pull = torch.zeros(())
        self.seen = torch.zeros(0, features)
        self.nearest = torch.zeros(0, dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        self.nearest = torch.cdist(x.detach(), self.codes.detach()).argmin(-1)
        code = self.codes[self.nearest].detach()
        self.seen = x.detach()
        self.pull = F.mse_loss(x, code)
        return x + (code - x).detach()


def _with_codes(t: Training, follow: Callable[[Codebook], None]) -> None:
    book = behind_first(t, Codebook)
    plain = t.loss
    t.loss = lambda model, batch: plain(model, batch) + 0.25 * book.pull
    t.each_step.append(lambda training: follow(book))


def averaged_codes(t: Training) -> None:
    """The codes are parameters; they follow the mean of their rows and get no gradient."""

    @torch.no_grad()
    def follow(book: Codebook) -> None:
        chosen = F.one_hot(book.nearest, len(book.codes)).float()
        count = chosen.sum(0).unsqueeze(1)
        mean = chosen.T @ book.seen / count.clamp(min=1.0)
        book.codes.copy_(torch.where(count > 0, 0.9 * book.codes + 0.1 * mean, book.codes))

    _with_codes(t, follow)


def moved_codes(t: Training) -> None:
    """Codes that are moved towards their rows by hand, one assignment after the other."""

    def follow(book: Codebook) -> None:
        for code in book.nearest.unique().tolist():
            rows = book.seen[book.nearest == code]
            book.codes.data[code] += 0.05 * (rows.mean(0) - book.codes.data[code])

    _with_codes(t, follow)


class Chosen(nn.Module):
    """One of three branches, chosen hard; ``pick`` makes the choice of the logits."""

    def __init__(self, features: int, pick: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate = nn.Linear(features, 3)
        self.branches = nn.ModuleList([nn.Linear(features, features) for _ in range(3)])
        self.pick = pick

    def forward(self, x: Tensor) -> Tensor:
        out = torch.stack([branch(x) for branch in self.branches], -1)
        return torch.tanh((out * self.pick(self.gate(x)).unsqueeze(-2)).sum(-1))


def _hard(logits: Tensor) -> Tensor:
    soft = logits.softmax(-1)
    hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
    return hard - soft.detach() + soft


def _hard_without_detach(logits: Tensor) -> Tensor:
    soft = logits.softmax(-1)
    with torch.no_grad():
        step = F.one_hot(soft.argmax(-1), 3).to(soft.dtype) - soft
    return soft + step


def drawn_branch(t: Training) -> None:
    behind_first(t, lambda n: Chosen(n, lambda logits: F.gumbel_softmax(logits, tau=1.0, hard=True)))


def best_branch(t: Training) -> None:
    behind_first(t, lambda n: Chosen(n, _hard))


def best_branch_without_grad(t: Training) -> None:
    behind_first(t, lambda n: Chosen(n, _hard_without_detach))


class SignClipped(torch.autograd.Function):
    """The sign; its gradient passes where the input is small."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= 1)


class Binarised(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return SignClipped.apply(x)


def clipped_signs(t: Training) -> None:
    behind_first(t, lambda n: Binarised())


class StepSize(nn.Module):
    """Activations on a grid whose step is learned, with a gradient that is scaled down."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.tensor(0.3))
        self.share = (features * 7) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        step = self.step * self.share
        step = step + (self.step - step).detach()
        on_grid = (x / step).clamp(-8, 7)
        return (on_grid + (on_grid.round() - on_grid).detach()) * step


def learned_step(t: Training) -> None:
    behind_first(t, StepSize)


class Router(nn.Module):
    """Two of four experts for each row, their shares made to add up to 1."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.gate = nn.Linear(features, 4, bias=False)
        self.experts = nn.ModuleList([nn.Linear(features, features) for _ in range(4)])
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        best, chosen = logits.topk(2, -1)
        shares = best.softmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            if len(row):
                out = out.index_add(0, row, shares[row, place].unsqueeze(1) * expert(x[row]))
        busy = F.one_hot(chosen, 4).float().sum(1).mean(0)
        self.balance = (busy * logits.softmax(-1).mean(0)).sum()
        return x + out


def top_two_experts(t: Training) -> None:
    router = behind_first(t, Router)
    plain = t.loss
    t.loss = lambda model, batch: plain(model, batch) + 0.01 * router.balance


class HardGate(nn.Module):
    """Units that are switched off for good by gates with a stretched sigmoid (L0)."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.full((features,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        s = self.log_alpha
        if self.training:
            u = torch.rand_like(s).clamp(1e-4, 1 - 1e-4)
            s = (u.log() - (1 - u).log() + s) / 0.66
        return x * (s.sigmoid() * 1.2 - 0.1).clamp(0, 1)


def gates(t: Training) -> None:
    gate = behind_first(t, HardGate)
    plain = t.loss
    t.loss = lambda model, batch: plain(model, batch) + 0.01 * gate.log_alpha.add(0.6).sigmoid().mean()


class Settled(nn.Module):
    """A layer that is applied until it settles; the gradient is that of the last round (a deep equilibrium)."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.inner = nn.Linear(features, features)
        nn.init.normal_(self.inner.weight, std=0.3 * features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(12):
                z = torch.tanh(self.inner(z) + x)
        return torch.tanh(self.inner(z) + x)


def settled(t: Training) -> None:
    behind_first(t, Settled)
