"""Loops, stages and gradients by hand for the end: nobody may look at them while laws are written."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Optimizer

from zoo.programs.training import Batch, Training


class DirectFeedback(nn.Module):
    """Layers that see no gradient of each other; what each of them makes is kept."""

    def __init__(self, *stages: nn.Module) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.states: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.states = []
        for stage in self.stages:
            x = stage(x.detach())
            self.states.append(x)
        return x


def direct_feedback(t: Training) -> None:
    """Direct feedback alignment (Nøkland, 2016): the error of the output goes to each layer by a fixed random way."""
    hidden = [nn.Sequential(nn.Linear(size, 64), nn.Tanh()) for size in (20, 64, 64)]
    t.model, t.epochs = DirectFeedback(*hidden, nn.Linear(64, 10)), 8
    ways = [(2 * torch.rand(10, 64) - 1) / 3 for _ in hidden]

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,), (x, y) = training.optimizers, batch
        logits = training.model(x)
        error = (logits.detach().softmax(1) - F.one_hot(y, 10)) / len(x)
        optimizer.zero_grad()
        torch.autograd.backward(training.model.states, [*(error @ way for way in ways), error])
        optimizer.step()
        return F.cross_entropy(logits.detach(), y)

    t.update = update


def bounded_rows(t: Training) -> None:
    """Dropout with max-norm (Srivastava et al., 2014): after a step no unit has a vector of weights that is longer."""
    t.model = nn.Sequential(
        *(nn.Dropout(0.1), nn.Linear(20, 96), nn.ReLU(), nn.Dropout(0.3)),
        *(nn.Linear(96, 96), nn.ReLU(), nn.Dropout(0.3), nn.Linear(96, 10)),
    )
    t.epochs = 10
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.1, momentum=0.9)]

    @torch.no_grad()
    def bound(training: Training) -> None:
        for layer in training.model:
            if isinstance(layer, nn.Linear):
                layer.weight.copy_(layer.weight.renorm(2, 0, 1.0))

    t.each_step.append(bound)


def _shortest(products: Tensor) -> Tensor:
    """The shares (n,) by which a mixture of vectors is the shortest, of their products (n, n): by Frank and Wolfe."""
    shares = torch.full((len(products),), 1 / len(products))
    for _ in range(20):
        away = shares - F.one_hot((products @ shares).argmin(), len(products))
        step = (shares @ products @ away) / (away @ products @ away).clamp(min=1e-12)
        shares = shares - step.clamp(0, 1) * away
    return shares


def shortest_mixture(t: Training) -> None:
    """MGDA-UB (Sener and Koltun, 2018): the body follows the shortest mixture of the gradients of three tasks."""
    t.model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    heads = nn.ModuleList(nn.Linear(64, classes) for classes in (10, 2, 2))
    t.extra.append(heads)
    t.epochs = 8

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,), (x, y) = training.optimizers, batch
        optimizer.zero_grad()
        found = training.model(x)
        losses, gradients = [], []
        for head, target in zip(heads, (y, y % 2, (y > 4).long())):
            seen = found.detach().requires_grad_()
            losses.append(F.cross_entropy(head(seen), target))
            losses[-1].backward()  # a head follows its own task alone
            assert seen.grad is not None
            gradients.append(seen.grad)
        each = torch.stack(gradients)
        shares = _shortest(each.flatten(1) @ each.flatten(1).T)
        found.backward((shares[:, None, None] * each).sum(0))
        optimizer.step()
        return torch.stack(losses).detach().mean()

    t.update = update


class ResilientSteps(Optimizer):
    """Each weight has a step of its own: by signs it grows or shrinks, and a step too far is taken back."""

    def __init__(self, params: list[nn.Parameter], first: float = 0.01) -> None:
        super().__init__(params, {"first": first})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = closure() if closure else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["slope"], state["move"] = torch.zeros_like(p), torch.zeros_like(p)
                    state["size"] = torch.full_like(p, group["first"])
                turn = (state["slope"] * p.grad).sign()
                factor = torch.where(turn > 0, 1.2, torch.where(turn < 0, 0.5, 1.0))
                state["size"].mul_(factor).clamp_(1e-6, 1.0)
                state["move"] = torch.where(turn < 0, -state["move"], -p.grad.sign() * state["size"])
                state["slope"] = torch.where(turn < 0, 0.0, p.grad)
                p.add_(state["move"])
        return loss


def resilient(t: Training) -> None:
    """Rprop (Riedmiller and Braun, 1993): the sizes of gradients do not count; all rows are in each batch."""
    t.batches_of = lambda training: [training.data.tensors] * 24
    t.optimizers_of = lambda training: [ResilientSteps(training.parameters(), 1e-3)]
    t.loaded, t.epochs = False, 6


def clipped_by_unit(t: Training) -> None:
    """Adaptive gradient clipping (Brock et al., 2021): no gradient of a unit is large against the unit's weights."""
    t.model = nn.Sequential(
        *(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU()),
        *(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(192, 4)),
    )
    t.epochs = 8
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.1, momentum=0.9, nesterov=True)]

    def norms(x: Tensor) -> Tensor:
        """Of the units of a weight; a bias has one."""
        return torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim())) or 0, keepdim=True)

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,) = training.optimizers
        optimizer.zero_grad()
        loss = training.loss(training.model, batch)
        loss.backward()
        with torch.no_grad():
            for p in training.parameters()[:-2]:  # the last layer is left out
                assert p.grad is not None
                most = 0.05 * norms(p).clamp(min=1e-3)
                p.grad.mul_((most / norms(p.grad).clamp(min=1e-6)).clamp(max=1))
        optimizer.step()
        return loss.detach()

    t.update = update


class ManyNetworks(nn.Module):
    """Networks of one form side by side; what comes out is (networks, rows, 1)."""

    def __init__(self, networks: int, into: int, width: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(networks, into, width) / into**0.5)
        self.bias = nn.Parameter(torch.zeros(networks, 1, width))
        self.last = nn.Parameter(torch.randn(networks, width, 1) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.first + self.bias).relu() @ self.last


def stein_particles(t: Training) -> None:
    """SVGD (Liu and Wang, 2016): networks are particles; they share their slopes, and keep away from each other."""
    t.model, t.epochs, variance = ManyNetworks(10, 12, 32), 12, 0.1
    t.optimizers_of = lambda training: [Adagrad(training.parameters(), lr=0.05)]

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,), (x, y), model = training.optimizers, batch, training.model
        out = model(x)
        fit = (out - y).square().mean((1, 2)) * len(training.data) / (2 * variance)
        prior = torch.stack([p.square().flatten(1).sum(1) for p in model.parameters()]).sum(0) / 2
        slopes = torch.autograd.grad((fit + prior).sum(), list(model.parameters()))
        with torch.no_grad():
            at = torch.cat([p.flatten(1) for p in model.parameters()], 1)
            slope = torch.cat([each.flatten(1) for each in slopes], 1)
            apart = torch.cdist(at, at).square()
            width = apart.median() / math.log(len(at))
            near = (-apart / width).exp()
            push = 2 / width * (near.sum(1, keepdim=True) * at - near @ at)
            force = (near @ slope - push) / len(at)  # against the direction in which the particles shall go
            parts = force.split([p[0].numel() for p in model.parameters()], 1)
        for p, part in zip(model.parameters(), parts):
            p.grad = part.view_as(p).contiguous()
        optimizer.step()
        return F.mse_loss(out.mean(0), y).detach()

    t.update = update
