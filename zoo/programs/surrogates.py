"""Legal techniques with surrogate gradients: weights and activations of few values, hard choices, stopped branches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.optim import SGD, Optimizer

from zoo.programs.models import _hook_first, _layers, _replace
from zoo.programs.training import Batch, Training


class Binary(nn.Module):
    """Weights of one bit and a scale."""

    def forward(self, weight: Tensor) -> Tensor:
        hard = weight.sign() * weight.detach().abs().mean()
        return weight + (hard - weight).detach()


class Ternary(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        bound = 0.7 * weight.detach().abs().mean()
        kept = (weight.detach().abs() > bound).float()
        scale = (weight.detach().abs() * kept).sum() / kept.sum().clamp(min=1)
        return weight + (weight.sign() * kept * scale - weight).detach()


class Spike(torch.autograd.Function):
    """A step, with the slope of a sigmoid."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        soft = torch.sigmoid(3 * x)
        return gradient * 3 * soft * (1 - soft)


class Clamped(torch.autograd.Function):
    """The identity; no element of the gradient is large."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e-3, 1e-3)


class Spiking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Spike.apply(x)


class Codebook(nn.Module):
    """The nearest of sixteen vectors in place of each vector."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(16, size) / 2)
        self.commitment = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        nearest = self.codes[torch.cdist(x, self.codes).argmin(-1)]
        self.commitment = F.mse_loss(nearest, x.detach()) + 0.25 * F.mse_loss(x, nearest.detach())
        return x + (nearest - x).detach()


class Gate(nn.Module):
    """Units that are switched off for good, learned through a relaxed coin."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.log_odds = nn.Parameter(torch.full((width,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x * (self.log_odds > 0)
        u = torch.rand_like(self.log_odds).clamp(1e-4, 1 - 1e-4)
        soft = torch.sigmoid((u.logit() + self.log_odds) / 0.66)
        return x * (soft + ((soft > 0.5).to(soft.dtype) - soft).detach())


def binary_weights(t: Training) -> None:
    for layer in _layers(t.model)[1:]:
        parametrize.register_parametrization(layer, "weight", Binary())


def ternary_weights(t: Training) -> None:
    for layer in _layers(t.model):
        parametrize.register_parametrization(layer, "weight", Ternary())


def spiking(t: Training) -> None:
    _replace(t.model, nn.ReLU, lambda _: Spiking())


def clamped_gradient(t: Training) -> None:
    _hook_first(t, Clamped.apply)


def codebook(t: Training) -> None:
    book = Codebook(3)
    t.model.insert(3, book)
    plain = t.loss
    t.loss = lambda model, batch: plain(model, batch) + book.commitment


def hard_choice(t: Training) -> None:
    """One of several heads for each row, by a hard Gumbel softmax."""
    features = t.data.tensors[0].shape[1]
    chooser = nn.Linear(features, 4)
    heads = nn.ModuleList([nn.Linear(features, 10) for _ in range(4)])
    t.extra += [chooser, heads]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        choice = F.gumbel_softmax(chooser(x), tau=1.0, hard=True)
        side = torch.einsum("nk,nkc->nc", choice, torch.stack([head(x) for head in heads], 1))
        return F.cross_entropy(model(x) + side, y)

    t.loss = loss


def unit_gates(t: Training) -> None:
    _replace(t.model, nn.ReLU, lambda _: nn.Sequential(nn.ReLU(), Gate(64)))


def adversarial_domain(t: Training) -> None:
    """A second loss that the body is to make worse, by a hook that turns its gradient around."""
    judge = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 2))
    t.extra.append(judge)
    plain = t.loss

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        hidden = model[:2](batch[0])
        turned = hidden * 1.0
        if turned.requires_grad:
            turned.register_hook(lambda gradient: -0.2 * gradient)
        return plain(model, batch) + F.cross_entropy(judge(turned), (batch[0][:, 1] > 0).long())

    t.loss = loss


def stopped_branch(t: Training) -> None:
    """A head that learns from the body and does not teach it."""
    head = nn.Linear(64, 10)
    t.extra.append(head)
    plain = t.loss
    t.loss = lambda model, batch: plain(model, batch) + F.cross_entropy(head(model[:2](batch[0]).detach()), batch[1])


def rounded_activations(t: Training) -> None:
    _replace(t.model, nn.ReLU, lambda _: nn.Sequential(nn.ReLU(), Rounded()))


class Rounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        low = (x.clamp(0, 1.75) * 4).round() / 4
        return x + (low - x).detach()


def stochastic_rounding(t: Training) -> None:
    """Weights of few bits (Gupta et al., 2015): after a step they are rounded up or down at random."""
    grid, t.epochs = 2.0**-7, 8
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.05, momentum=0.9)]

    @torch.no_grad()
    def on_grid(training: Training) -> None:
        for p in training.parameters():
            p.copy_(torch.floor(p / grid + torch.rand_like(p)) * grid)

    on_grid(t)
    t.each_step.append(on_grid)


class LargestHalf(torch.autograd.Function):
    """1 for the larger half of the scores, 0 for the others; the gradient passes."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, scores: Tensor) -> Tensor:
        return (scores >= scores.median()).to(scores.dtype)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        return gradient


class Subnetwork(nn.Linear):
    """A layer whose weights stay as they were drawn; which of them are there is learned."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__(into, out, bias=False)
        with torch.no_grad():
            self.weight.copy_(torch.randn_like(self.weight).sign() * (4 / into) ** 0.5)
        self.weight.requires_grad_(False)
        self.scores = nn.Parameter(torch.empty_like(self.weight))
        nn.init.kaiming_uniform_(self.scores, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * LargestHalf.apply(self.scores.abs()))


def found_subnetwork(t: Training) -> None:
    """Edge-popup (Ramanujan et al., 2020): a good network is found within a random one, whose weights never learn."""
    t.model = nn.Sequential(Subnetwork(20, 128), nn.ReLU(), Subnetwork(128, 128), nn.ReLU(), Subnetwork(128, 10))
    t.epochs = 12
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.1, momentum=0.9)]


class ClippedToBits(torch.autograd.Function):
    """Activations between 0 and alpha in 4 bits; where they are cut off, alpha gets the gradient."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, alpha: Tensor) -> Tensor:
        ctx.save_for_backward(x, alpha)
        step = alpha / 15
        return torch.minimum(x.clamp(min=0), alpha).div(step).round() * step

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, alpha = ctx.saved_tensors
        above = x >= alpha
        return gradient * ((x > 0) & ~above), (gradient * above).sum()


class Pact(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(6.0))

    def forward(self, x: Tensor) -> Tensor:
        return ClippedToBits.apply(x, self.alpha)


def learned_clipping(t: Training) -> None:
    """PACT (Choi et al., 2018): activations of few bits, whose upper end is learned and pulled down."""
    t.model[2], t.model[5] = Pact(), Pact()
    t.epochs = 8

    def groups(training: Training) -> list[Optimizer]:
        ends = [each for name, each in training.model.named_parameters() if name.endswith("alpha")]
        rest = [each for name, each in training.model.named_parameters() if not name.endswith("alpha")]
        return [SGD([{"params": rest}, {"params": ends, "weight_decay": 2e-2}], lr=0.05, momentum=0.9)]

    t.optimizers_of = groups
