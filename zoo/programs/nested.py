"""Legal training within training: hyperparameters, rates, weights of examples and pictures that learn as well."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import TensorDataset

from zoo.programs.gradients_by_hand import _before_update
from zoo.programs.training import Batch, Training


def reweighted_examples(t: Training) -> None:
    """Learning to reweight examples (Ren et al., 2018): what a step on each would do to the loss on clean data."""
    x, y = t.data.tensors
    clean = x[:64], y[:64]
    wrong = torch.rand(len(y)) < 0.4
    t.data = TensorDataset(x[64:], torch.where(wrong, torch.randint(10, (len(y),)), y)[64:])
    t.epochs, t.batch_size = 12, 64

    def shares(model: nn.Module, batch: Batch) -> Tensor:
        weights = dict(model.named_parameters())
        each = F.cross_entropy(functional_call(model, weights, (batch[0],)), batch[1], reduction="none")
        share = torch.zeros_like(each, requires_grad=True)
        slopes = torch.autograd.grad((share * each).sum(), list(weights.values()), create_graph=True)
        moved = {name: p - 0.1 * slope for (name, p), slope in zip(weights.items(), slopes)}
        after = F.cross_entropy(functional_call(model, moved, (clean[0],)), clean[1])
        (worth,) = torch.autograd.grad(after, share)
        kept = (-worth).clamp(min=0)
        return kept / kept.sum().clamp(min=1e-12)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        share = shares(model, batch)
        return (share * F.cross_entropy(model(batch[0]), batch[1], reduction="none")).sum()

    t.loss = loss


def learned_rate(t: Training) -> None:
    """Hypergradient descent (Baydin et al., 2018): the rate follows the product of this gradient and the last."""
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.01)]
    t.epochs, last = 8, [torch.zeros_like(p) for p in t.parameters()]

    def follow(training: Training) -> None:
        new = [p.grad.clone() for p in training.parameters()]
        training.optimizers[0].param_groups[0]["lr"] += 0.03 * float(sum((a * b).sum() for a, b in zip(new, last)))
        last[:] = new

    _before_update(t, follow)


def _dot(some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(some, others)]).sum()


def implicit_hypergradient(t: Training) -> None:
    """Weight decays by implicit differentiation, the inverse Hessian by a Neumann series (Lorraine et al., 2020)."""
    x, y = t.data.tensors
    held_out = x[:256], y[:256]
    t.data, t.epochs = TensorDataset(x[256:512], y[256:512]), 40
    log_decay = nn.ParameterList([nn.Parameter(torch.tensor(-5.0)) for _ in t.model.parameters()])
    t.extra.append(log_decay)

    def both(training: Training) -> list[Optimizer]:
        return [Adam(training.model.parameters(), lr=training.lr), Adam(log_decay.parameters(), lr=0.05)]

    def penalised(model: nn.Module, batch: Batch) -> Tensor:
        decays = [decay.exp() * p.square().sum() for decay, p in zip(log_decay, model.parameters())]
        return F.mse_loss(model(batch[0]), batch[1]) + torch.stack(decays).sum()

    def hypergradient(training: Training, batch: Batch) -> Sequence[Tensor]:
        weights = list(training.model.parameters())
        v = torch.autograd.grad(F.mse_loss(training.model(held_out[0]), held_out[1]), weights)
        slopes = torch.autograd.grad(penalised(training.model, batch), weights, create_graph=True)
        total = v
        for _ in range(10):
            bend = torch.autograd.grad(slopes, weights, v, retain_graph=True)
            v = tuple(a - 0.05 * b for a, b in zip(v, bend))
            total = tuple(a + b for a, b in zip(total, v))
        return torch.autograd.grad(_dot(slopes, total), list(log_decay), grad_outputs=torch.tensor(-0.05))

    def update(training: Training, batch: Batch) -> Tensor:
        inner, outer = training.optimizers
        inner.zero_grad()
        loss = penalised(training.model, batch)
        loss.backward()
        inner.step()
        if training.steps % 8 == 7:
            for p, gradient in zip(log_decay, hypergradient(training, batch)):
                p.grad = gradient
            outer.step()
        return loss.detach()

    t.optimizers_of, t.update = both, update


def waves() -> tuple[Tensor, Tensor]:
    """A task: 20 points (20, 1) of a sine with an amplitude and a phase of its own."""
    x = 10 * torch.rand(20, 1) - 5
    return x, (0.5 + 1.5 * torch.rand(())) * torch.sin(x + math.pi * torch.rand(()))


def reptile(t: Training) -> None:
    """Reptile (Nichol et al., 2018): the weights go a part of the way to where some steps on one task lead."""
    t.model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    t.epochs = 20
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.02)]

    def tasks(training: Training) -> Iterator[Tensor]:
        number, losses = 60 * training.epochs, []
        for task in range(number):
            before = copy.deepcopy(training.model.state_dict())
            batch = waves()
            losses += [training.plain_update(batch) for _ in range(8)]
            with torch.no_grad():
                for name, p in training.model.named_parameters():
                    p.copy_(before[name].lerp(p, 1 - task / number))
            if task % 5 == 4:
                yield torch.stack(losses).mean()
                losses.clear()

    t.loop, t.loaded = tasks, False


class Condensed(nn.Module):
    """One picture for each of four classes, which are to teach what the whole set teaches."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures = nn.Parameter(torch.randn(4, 1, 8, 8))

    def forward(self) -> Tensor:
        return self.pictures


def pupil() -> nn.Sequential:
    """A network that nobody has trained."""
    first = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.ReLU())
    return nn.Sequential(*first, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 4))


def _apart(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> Tensor:
    """One minus the cosine, summed over the units of each matrix."""
    pairs = [(one.flatten(1), other.flatten(1)) for one, other in zip(ours, theirs) if one.dim() > 1]
    return torch.stack([(1 - F.cosine_similarity(one, other, dim=1)).sum() for one, other in pairs]).sum()


def condensed(t: Training) -> None:
    """Dataset condensation (Zhao et al., 2021): pictures learn to give fresh networks the gradients of true ones."""
    x, y = t.data.tensors
    kinds = [x[y == kind] for kind in range(4)]
    t.model, t.epochs = Condensed(), 5
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.2, momentum=0.5)]

    def gradients(network: nn.Module, x: Tensor, kind: int, learns: bool) -> tuple[Tensor, ...]:
        loss = F.cross_entropy(network(x), torch.full((len(x),), kind))
        return torch.autograd.grad(loss, tuple(network.parameters()), create_graph=learns)

    def rounds(training: Training) -> Iterator[Tensor]:
        (optimizer,) = training.optimizers
        for _ in range(6 * training.epochs):
            network = pupil()
            below = SGD(network.parameters(), lr=0.05)
            for _ in range(4):
                pictures, loss = training.model(), torch.zeros(())
                for kind, rows in enumerate(kinds):
                    true = gradients(network, rows[torch.randint(len(rows), (32,))], kind, False)
                    loss = loss + _apart(gradients(network, pictures[kind : kind + 1], kind, True), true)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                yield loss.detach()
                for _ in range(3):
                    below.zero_grad()
                    F.cross_entropy(network(training.model().detach()), torch.arange(4)).backward()
                    below.step()

    t.loop, t.loaded = rounds, False
