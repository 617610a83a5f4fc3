"""Legal estimators for what is drawn within a model: several samples, drawn choices, shaken branches."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Normal
from torch.nn import functional as F

from zoo.programs.places import behind_first
from zoo.programs.training import Batch, Training


class BeliefNet(nn.Module):
    """Drawn bits, and what they say of a row: the prior, the posterior and the likelihood are learned."""

    def __init__(self, features: int, bits: int = 12) -> None:
        super().__init__()
        self.prior, self.log_std = nn.Parameter(torch.zeros(bits)), nn.Parameter(torch.zeros(()))
        self.encoder = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, bits))
        self.decoder = nn.Sequential(nn.Linear(bits, 32), nn.ReLU(), nn.Linear(32, features))

    def forward(self, x: Tensor, draws: int) -> tuple[Tensor, Tensor]:
        """The logarithms of the importance weights and of the posterior, (draws, n) each."""
        posterior = Bernoulli(logits=self.encoder(x))
        bits = posterior.sample((draws,))
        log_q = posterior.log_prob(bits).sum(-1)
        likelihood = Normal(self.decoder(bits), self.log_std.exp()).log_prob(x).sum(-1)
        return likelihood + Bernoulli(logits=self.prior).log_prob(bits).sum(-1) - log_q, log_q


def several_samples(t: Training) -> None:
    """VIMCO (Mnih and Rezende, 2016): a bound of several samples; each has the others for a baseline."""
    t.model, t.epochs, draws = BeliefNet(8), 8, 5

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        log_w, log_q = model(batch[0], draws)
        bound = log_w.logsumexp(0) - math.log(draws)
        seen = log_w.detach()
        others = (seen.sum(0) - seen) / (draws - 1)
        without = torch.where(torch.eye(draws, dtype=torch.bool).unsqueeze(-1), others, seen.unsqueeze(0))
        signal = bound.detach() - (without.logsumexp(1) - math.log(draws))
        return -(bound + (signal * log_q).sum(0) - (signal * log_q).sum(0).detach()).mean()

    t.loss = loss


class Autoencoding(nn.Module):
    """A variational autoencoder with Gaussian latents."""

    def __init__(self, features: int, latents: int = 3) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, 32), nn.Tanh(), nn.Linear(32, 2 * latents))
        self.decoder = nn.Sequential(nn.Linear(latents, 32), nn.Tanh(), nn.Linear(32, features))
        self.log_std = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x).chunk(2, -1)[0])


def doubly_reparametrised(t: Training) -> None:
    """DReG (Tucker et al., 2019): the importance-weighted bound without the score term of the encoder."""
    t.model, t.epochs, draws = Autoencoding(8), 8, 8

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        mean, log_std = model.encoder(batch[0]).chunk(2, -1)
        z = mean + log_std.exp() * torch.randn(draws, *mean.shape)
        log_q = Normal(mean.detach(), log_std.detach().exp()).log_prob(z).sum(-1)
        log_p = Normal(model.decoder(z), model.log_std.exp()).log_prob(batch[0]).sum(-1)
        log_w = log_p + Normal(0.0, 1.0).log_prob(z).sum(-1) - log_q
        share = log_w.detach().softmax(0)
        if z.requires_grad:
            z.register_hook(lambda gradient: share.unsqueeze(-1) * gradient)
        return -(share * log_w).sum(0).mean()

    t.loss = loss


def reinmax(logits: Tensor) -> Tensor:
    """A drawn choice (one-hot), whose gradient is right to the second order."""
    plain = logits.softmax(-1)
    drawn = F.one_hot(torch.distributions.Categorical(probs=plain).sample(), logits.shape[-1]).to(logits.dtype)
    middle = ((drawn + plain) / 2).log()
    middle = ((middle - logits).detach() + logits).softmax(-1)
    surrogate = 2 * middle - plain / 2
    return surrogate + (drawn - surrogate).detach()


class Categories(nn.Module):
    """An autoencoder whose code is four choices of eight."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 32), nn.Unflatten(1, (4, 8)))
        self.decoder = nn.Sequential(nn.Flatten(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, features))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(reinmax(self.encoder(x)))


def second_order_choice(t: Training) -> None:
    """ReinMax (Liu et al., 2023): straight through a drawn choice, by Heun's rule."""
    t.model, t.epochs = Categories(8), 8


class Shake(torch.autograd.Function):
    """A drawn mixture of two; the gradient is mixed by another drawing."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, one: Tensor, other: Tensor) -> Tensor:
        return torch.lerp(one, other, torch.rand(len(one), 1))

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        share = torch.rand(len(gradient), 1)
        return (1 - share) * gradient, share * gradient


class Shaken(nn.Module):
    """A residual layer of two branches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.other = (
            nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.one(x), self.other(x)
        return x + (Shake.apply(one, other) if self.training else (one + other) / 2)


def shaken(t: Training) -> None:
    """Shake-Shake (Gastaldi, 2017): branches are mixed at random, one way forward and another way back."""
    behind_first(t, Shaken)
    t.epochs = 8
