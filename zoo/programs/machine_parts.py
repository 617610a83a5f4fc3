"""Modules and functions of ``machines``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from zoo.host import mlp


class Beliefs:
    """Bayesian linear regressions of the rewards of arms on features, with noise of one half."""

    def __init__(self, arms: int, size: int) -> None:
        self.precision, self.response = torch.eye(size).repeat(arms, 1, 1), torch.zeros(arms, size)

    def add(self, features: Tensor, arm: Tensor, reward: Tensor) -> None:
        for number in range(len(self.response)):
            here = features[arm == number]
            self.precision[number] += 4 * here.T @ here
            self.response[number] += 4 * here.T @ reward[arm == number]

    def pull(self, features: Tensor) -> Tensor:
        """The best arms by a draw from the posterior."""
        factor = torch.linalg.cholesky(self.precision)
        mean = torch.cholesky_solve(self.response.unsqueeze(2), factor)
        noise = torch.linalg.solve_triangular(factor.mT, torch.randn_like(mean), upper=True)
        return (features @ (mean + noise).squeeze(2).T).argmax(1)

    def forget(self) -> None:
        self.precision[:], self.response[:] = torch.eye(self.precision.shape[1]), 0.0


class Towers(nn.Module):
    """Encoders of queries and of documents, onto the sphere."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.query, self.document = mlp(features, 16), mlp(features, 16)

    def forward(self, query: Tensor, document: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.query(query), dim=-1), F.normalize(self.document(document), dim=-1)


class Writer(nn.Module):
    """Writes expressions in prefix notation, token by token; arities keep them whole and short."""

    arity = torch.tensor([2, 2, 2, 1, 1, 0, 0, 0])  # add, subtract, multiply, sine, square, a, b, c

    def __init__(self, length: int = 11) -> None:
        super().__init__()
        self.length, self.before = length, nn.Embedding(9, 16)
        self.cell, self.head = nn.GRUCell(16, 48), nn.Linear(48, 8)

    def forward(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (n, length), -1 behind an expression's end; its log-likelihood, and its entropy."""
        state, token, missing = torch.zeros(n, 48), torch.full((n,), 8), torch.ones(n, dtype=torch.long)
        tokens, logs, entropies = [], torch.zeros(n), torch.zeros(n)
        for place in range(self.length):
            state = self.cell(self.before(token), state)
            too_long = missing.unsqueeze(1) + self.arity - 1 > self.length - place - 1
            drawn, goes_on = Categorical(logits=self.head(state).masked_fill(too_long, -1e9)), missing > 0
            token = drawn.sample()
            logs, entropies = logs + goes_on * drawn.log_prob(token), entropies + goes_on * drawn.entropy()
            tokens.append(torch.where(goes_on, token, -1))
            missing = torch.where(goes_on, missing + self.arity[token] - 1, 0)
        return torch.stack(tokens, 1), logs, entropies


def value_of(tokens: Sequence[int], leaves: Tensor) -> Tensor:
    """What an expression in prefix notation is worth, read from its end."""
    stack: list[Tensor] = []
    for token in reversed([token for token in tokens if token >= 0]):
        if token >= 5:
            stack.append(leaves[token - 5])
        elif token >= 3:
            stack.append(stack.pop().sin() if token == 3 else stack.pop().square())
        else:
            left, right = stack.pop(), stack.pop()
            stack.append(left + right if token == 0 else left - right if token == 1 else left * right)
    return stack[0]


class DecisionLoss(torch.autograd.Function):
    """SPO+ of predicted costs; its subgradient is twice the difference of two decisions."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, predicted: Tensor, cost: Tensor) -> Tensor:
        best, bent = cheapest(cost), cheapest(2 * predicted - cost)
        ctx.save_for_backward(best - bent)
        return (bent * (cost - 2 * predicted) + best * (2 * predicted - cost)).sum(1)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        (difference,) = ctx.saved_tensors
        return 2 * gradient.unsqueeze(1) * difference, None


def cheapest(cost: Tensor, n: int = 3) -> Tensor:
    """The decision: one at the ``n`` suppliers of least cost."""
    return torch.zeros_like(cost).scatter(1, cost.topk(n, largest=False).indices, 1.0)


class Automaton(nn.Module):
    """Cells of eight channels: the first is seen, the second says who lives."""

    kernels: Tensor

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        slope = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]) / 8
        itself = torch.zeros(3, 3)
        itself[1, 1] = 1.0
        self.register_buffer("kernels", torch.stack([itself, slope, slope.T]).unsqueeze(1).repeat(channels, 1, 1, 1))
        self.rule = nn.Sequential(nn.Conv2d(3 * channels, 48, 1), nn.ReLU(), nn.Conv2d(48, channels, 1, bias=False))
        nn.init.zeros_(self.rule[2].weight)

    def forward(self, cells: Tensor) -> Tensor:
        alive = F.max_pool2d(cells[:, 1:2], 3, 1, 1) > 0.1
        change = self.rule(F.conv2d(cells, self.kernels, padding=1, groups=cells.shape[1]))
        cells = cells + change * (torch.rand_like(cells[:, :1]) < 0.5)
        return cells * (alive & (F.max_pool2d(cells[:, 1:2], 3, 1, 1) > 0.1))


class Gates(nn.Module):
    """Each output reads two inputs and is a mixture of the sixteen gates, which becomes one when it is used."""

    terms: Tensor
    wires: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        truth = (torch.arange(16).unsqueeze(1) >> torch.arange(4)).bitwise_and(1).float()  # at 00, 01, 10 and 11
        at_00, at_01, at_10, at_11 = truth.unbind(1)
        terms = [at_00, at_10 - at_00, at_01 - at_00, at_00 + at_11 - at_01 - at_10]  # 1, a, b and ab
        self.register_buffer("terms", torch.stack(terms, 1))
        self.register_buffer("wires", torch.randint(inputs, (2, outputs)))
        self.choice = nn.Parameter(torch.randn(outputs, 16))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x[:, self.wires[0]], x[:, self.wires[1]]
        share = self.choice.softmax(1) if self.training else F.one_hot(self.choice.argmax(1), 16).float()
        one, of_a, of_b, of_both = (share @ self.terms).unbind(1)
        return one + of_a * a + of_b * b + of_both * a * b


class JumpReLU(torch.autograd.Function):
    """Values above a threshold, and how many they are; thresholds learn through a window around themselves."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(z, threshold)
        above = (z > threshold).to(z.dtype)
        return z * above, above

    @staticmethod
    def backward(ctx: Any, of_value: Tensor, of_count: Tensor) -> tuple[Tensor, Tensor]:
        z, threshold = ctx.saved_tensors
        window = ((z - threshold).abs() < 0.05).to(z.dtype) / 0.1
        return of_value * (z > threshold), -((threshold * of_value + of_count) * window).sum(0)


class Dictionary(nn.Module):
    """A sparse autoencoder; rows of ``atoms`` have length one."""

    def __init__(self, size: int, atoms: int) -> None:
        super().__init__()
        self.atoms = nn.Parameter(F.normalize(torch.randn(atoms, size), dim=1))
        self.encoder, self.middle = nn.Linear(size, atoms), nn.Parameter(torch.zeros(size))
        self.log_threshold = nn.Parameter(torch.full((atoms,), 0.1).log())
        with torch.no_grad():
            self.encoder.weight.copy_(0.5 * self.atoms)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes, above = JumpReLU.apply(self.encoder(x - self.middle).relu(), self.log_threshold.exp())
        return codes @ self.atoms + self.middle, above.sum(1)


class Squashed(nn.Module):
    """LipSwish: its slope is at most one."""

    def __init__(self) -> None:
        super().__init__()
        self.sharpness = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x * F.softplus(self.sharpness)) / 1.1


class Contraction(nn.Module):
    """``x + g(x)`` where ``g`` shrinks all distances; the logarithm of its volume is estimated without bias."""

    def __init__(self, size: int = 2, width: int = 48) -> None:
        super().__init__()
        widths = (size, width, width, size)
        layers = [spectral_norm(nn.Linear(*pair)) for pair in pairwise(widths)]
        self.inner = nn.Sequential(layers[0], Squashed(), layers[1], Squashed(), layers[2])

    def g(self, x: Tensor) -> Tensor:
        return 0.9 * self.inner(x)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x if x.requires_grad else x.requires_grad_()
        moved, probe = self.g(x), torch.randn_like(x)
        more = int(torch.distributions.Geometric(0.5).sample())  # terms beyond the two that are always taken
        product, volume = probe, torch.zeros(len(x))
        for k in range(1, 3 + more):
            (product,) = torch.autograd.grad(moved, x, product, create_graph=True)
            share = 2.0 ** max(0, k - 2)  # one by the chance that this term is taken
            volume = volume - (-1) ** k * share / k * (product * probe).sum(1)
        return x + moved, volume

    @torch.no_grad()
    def inverse(self, y: Tensor) -> Tensor:
        x = y
        for _ in range(60):
            x = y - self.g(x)
        return x


class Energy(nn.Module):
    """A scalar of place and momentum; things move along its level lines."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, state: Tensor) -> Tensor:
        """Velocities (n, 2) of place and momentum."""
        with torch.enable_grad():
            state = state.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(state).sum(), state, create_graph=True)
        return torch.stack([slope[:, 1], -slope[:, 0]], 1)
