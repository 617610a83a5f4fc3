"""Legal training within limits: weights that shrink, rows and gradients that are bounded, a tangent, adversaries."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from zoo.programs.training import Batch, Training


def proximal(t: Training) -> None:
    """Proximal gradient steps for an L1 penalty (Parikh and Boyd, 2014): weights shrink, and the small are zero."""
    weights, penalty, t.epochs = [p for p in t.parameters() if p.dim() > 1], 3e-3, 16
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.2)]
    t.scheduler_of = lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step / 100))

    @torch.no_grad()
    def shrink(training: Training) -> None:
        lr = training.optimizers[0].param_groups[0]["lr"]
        for p in weights:
            p.copy_(F.softshrink(p, lr * penalty))

    t.each_step.append(shrink)


class Linearised(nn.Module):
    """The first-order Taylor series of a network in its weights; how far to go from them is learned."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.requires_grad_(False)
        self.moves = nn.ParameterList([nn.Parameter(torch.zeros_like(p)) for p in network.parameters()])

    def forward(self, x: Tensor) -> Tensor:
        learns = torch.is_grad_enabled()
        weights = {name: p.detach().requires_grad_() for name, p in self.network.named_parameters()}
        with torch.enable_grad():
            out = functional_call(self.network, weights, (x,))
            along = torch.zeros_like(out, requires_grad=True)
            slopes = torch.autograd.grad(out, list(weights.values()), along, create_graph=True)
            change = torch.autograd.grad(slopes, along, list(self.moves), create_graph=learns)[0]
        return out.detach() + change  # the change is linear in the moves


def linearised(t: Training) -> None:
    """A linearised network (Lee et al., 2019): what a very wide one would do, with the tangent kernel of its start."""
    t.model = Linearised(t.model)
    t.epochs = 8


def smoothed_adversary(t: Training) -> None:
    """SmoothAdv (Salman et al., 2019): inputs that mislead a classifier under noise, its weights held meanwhile."""
    t.epochs, draws, radius = 8, 2, 1.0

    def attack(model: nn.Module, x: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        move = torch.zeros_like(x)
        for _ in range(2):
            move.requires_grad_()
            shares = model((x + move + noise).flatten(0, 1)).softmax(1).view(draws, len(x), -1).mean(0)
            (slope,) = torch.autograd.grad(F.nll_loss(shares.log(), y), move)
            move = move.detach() + radius * F.normalize(slope.flatten(1), dim=1).view_as(x)
            move = move * (radius / move.flatten(1).norm(dim=1).clamp(min=radius)).view(-1, 1, 1, 1)
        return move

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        noise = 0.5 * torch.randn(draws, *x.shape)
        model.requires_grad_(False)
        move = attack(model, x, y, noise)
        model.requires_grad_(True)
        return F.cross_entropy(model((x + move + noise).flatten(0, 1)), y.repeat(draws))

    t.loss = loss


def balanced_robustness(t: Training) -> None:
    """TRADES (Zhang et al., 2019): right where nothing is moved, and the same answer where it changes the most."""
    t.epochs, radius, rate = 12, 0.2, 0.07

    def attack(model: nn.Module, x: Tensor) -> Tensor:
        model.eval()
        with torch.no_grad():
            answer = model(x).softmax(1)
        moved = x + 1e-3 * torch.randn_like(x)
        for _ in range(4):
            moved.requires_grad_()
            apart = F.kl_div(model(moved).log_softmax(1), answer, reduction="sum")
            (slope,) = torch.autograd.grad(apart, moved)
            moved = x + (moved.detach() + rate * slope.sign() - x).clamp(-radius, radius)
        model.train()
        return moved

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        moved = attack(model, x)
        logits = model(x)
        apart = F.kl_div(model(moved).log_softmax(1), logits.softmax(1), reduction="batchmean")
        return F.cross_entropy(logits, y) + 6.0 * apart

    t.loss = loss


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
