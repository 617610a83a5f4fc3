"""Legal training within limits: weights that shrink to zero, a model linear in its weights, a ball for an adversary."""

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
