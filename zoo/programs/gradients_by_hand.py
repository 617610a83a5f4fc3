"""Legal techniques that make gradients and updates by hand, or learn from more than the loss of a batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.optim import Adagrad, Adam
from torch.utils.data import TensorDataset

from zoo.programs.places import bodies, score
from zoo.programs.training import Batch, Training


def _before_update(t: Training, change: Callable[[Training], None]) -> None:
    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,) = training.optimizers
        optimizer.zero_grad()
        loss = training.loss(training.model, batch)
        loss.backward()
        change(training)
        optimizer.step()
        return loss.detach()

    t.update = update


def signs_of_gradients(t: Training) -> None:
    """SGD with the signs of the gradients."""
    t.optimizers_of = lambda training: [torch.optim.SGD(training.parameters(), lr=5e-3)]

    def signs(training: Training) -> None:
        for p in training.parameters():
            if p.grad is not None:
                p.grad.sign_()

    _before_update(t, signs)


def binary_while_computing(t: Training) -> None:
    """BinaryConnect: weights are signs in the forward and backward pass, and are updated as they were before."""
    layers = [layer for _, _, layer in list(bodies(t.model))[1:2] or list(bodies(t.model))[:1]]

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,) = training.optimizers
        kept = [layer.weight.detach().clone() for layer in layers]
        with torch.no_grad():
            for layer in layers:
                layer.weight.copy_(layer.weight.sign() * layer.weight.abs().mean())
        optimizer.zero_grad()
        loss = training.loss(training.model, batch)
        loss.backward()
        with torch.no_grad():
            for layer, weight in zip(layers, kept):
                layer.weight.copy_(weight)
        optimizer.step()
        return loss.detach()

    t.update = update


def bootstrapped(t: Training) -> None:
    """A second view must foretell what a slow copy of the first layers makes of the first (BYOL)."""
    layer = next(bodies(t.model))[2]
    slow = copy.deepcopy(layer).requires_grad_(False)
    head = nn.Linear(layer.out_features, layer.out_features)
    t.extra.append(head)
    plain = t.loss

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch[0].flatten(1) if batch[0].dim() == 4 else batch[0]
        with torch.no_grad():
            aim = F.normalize(slow(x + 0.1 * torch.randn_like(x)), dim=-1)
        seen = F.normalize(head(layer(x + 0.1 * torch.randn_like(x))), dim=-1)
        return plain(model, batch) + 0.3 * (2 - 2 * (seen * aim).sum(-1)).mean()

    @torch.no_grad()
    def follow(training: Training) -> None:
        for kept, new in zip(slow.parameters(), layer.parameters()):
            kept.lerp_(new, 0.02)

    t.loss = loss
    t.each_step.append(follow)


def rescaled_outputs(t: Training) -> None:
    """PopArt: targets are normalised by running statistics, and the last layer moves with them."""
    last = [each for each in t.model.modules() if isinstance(each, nn.Linear)][-1]
    mean, std = torch.zeros(()), torch.ones(())

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        with torch.no_grad():
            new_mean, new_std = mean.lerp(y.mean(), 0.05), std.lerp(y.std(), 0.05)
            last.weight.mul_(std / new_std)
            last.bias.copy_((std * last.bias + mean - new_mean) / new_std)
            mean.copy_(new_mean)
            std.copy_(new_std)
        return F.mse_loss(model(x), (y - mean) / std)

    t.loss = loss


def learned_to_learn(t: Training) -> None:
    """The loss of the second half of a batch after a step on the first half (MAML)."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        first, second = (tuple(part[half::2] for part in batch) for half in (0, 1))
        weights = dict(model.named_parameters())
        inner = score(t, functional_call(model, weights, (first[0],)), first[1])
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {name: p - 0.05 * g for (name, p), g in zip(weights.items(), slopes)}
        return score(t, functional_call(model, moved, (second[0],)), second[1])

    t.loss = loss


def flat_minimum(t: Training) -> None:
    """An estimate of the trace of the curvature of the inputs' loss by a random direction (Hutchinson)."""
    plain = t.loss

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch[0].detach().clone().requires_grad_()
        main = plain(model, (x, batch[1]))
        (slope,) = torch.autograd.grad(main, x, create_graph=True)
        along = torch.randint_like(x, 2) * 2 - 1
        (bend,) = torch.autograd.grad((slope * along).sum(), x, create_graph=True)
        return main + 0.01 * (bend * along).sum().square()

    t.loss = loss


def private(t: Training) -> None:
    """Gradients of single samples, each clipped, with noise on their sum (DP-SGD)."""

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,) = training.optimizers
        weights = {n: p.detach() for n, p in training.model.named_parameters()}

        def loss_of(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            out = functional_call(training.model, weights, (x.unsqueeze(0),))
            return score(t, out, y.unsqueeze(0))

        each = vmap(grad(loss_of), in_dims=(None, 0, 0))(weights, *batch)
        norms = sum(g.flatten(1).square().sum(1) for g in each.values()).sqrt()
        share = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, p in training.model.named_parameters():
            summed = torch.einsum("n...,n->...", each[name], share)
            p.grad = (summed + 0.1 * torch.randn_like(p)) / len(batch[0])
        optimizer.step()
        with torch.no_grad():
            return training.loss(training.model, batch)

    t.update = update


def surgery(t: Training) -> None:
    """Of two losses each gradient loses what goes against the other (PCGrad)."""

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,) = training.optimizers
        main = training.loss(training.model, batch)
        out = training.model(batch[0])
        other = F.smooth_l1_loss(out, torch.zeros_like(out))
        weights = training.parameters()
        one, two = (
            torch.autograd.grad(each, weights, retain_graph=True, allow_unused=True) for each in (main, 0.1 * other)
        )
        for p, a, b in zip(weights, one, two):
            if a is None or b is None:
                p.grad = a if b is None else b
                continue
            against = (a * b).sum().clamp(max=0.0)
            p.grad = a - against / (b.square().sum() + 1e-12) * b + b - against / (a.square().sum() + 1e-12) * a
        optimizer.step()
        return main.detach()

    t.update = update


def layer_by_layer(t: Training) -> None:
    """Each layer has a head and a loss of its own, and gets no gradient from those behind it."""
    parent, name, layer = next(bodies(t.model))
    classes = [each for each in t.model.modules() if isinstance(each, nn.Linear)][-1].out_features
    head = nn.Linear(layer.out_features, classes)
    t.extra.append(head)
    kept: list[Tensor] = []

    class Apart(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kept.append(x)
            return x.detach()

    setattr(parent, name, nn.Sequential(layer, Apart()))
    plain = t.loss

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        kept.clear()
        main = plain(model, batch)
        return main + score(t, head(torch.relu(kept.pop())), batch[1])

    t.loss = loss


def gradient_normalised(t: Training) -> None:
    """GradNorm (Chen et al., 2018): the weights of three tasks learn, so that the tasks teach at like rates."""
    x, y = t.data.tensors
    t.data = TensorDataset(x, torch.cat([y, 3 * x[:, 9:10].sin(), 0.3 * x[:, 10:11] * x[:, 11:12]], 1))
    t.model[4] = nn.Linear(64, 3)
    shared, balance = t.model[2].weight, nn.ParameterList([nn.Parameter(torch.zeros(3))])
    t.extra.append(balance)
    t.epochs, first = 10, torch.zeros(3)
    t.optimizers_of = lambda training: [
        Adam(training.model.parameters(), lr=t.lr), Adam(balance.parameters(), lr=0.025),
    ]  # fmt: skip

    def update(training: Training, batch: Batch) -> Tensor:
        losses = (training.model(batch[0]) - batch[1]).square().mean(0)
        if training.steps == 0:
            first.copy_(losses.detach())
        weights = 3 * balance[0].softmax(0)
        norms = torch.stack(
            [torch.autograd.grad(each, shared, create_graph=True)[0].norm() for each in weights * losses]
        )
        progress = losses.detach() / first
        aim = norms.mean().detach() * progress / progress.mean()
        (pull,) = torch.autograd.grad((norms - aim).abs().sum(), balance[0], retain_graph=True)
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        (weights.detach() * losses).sum().backward()
        balance[0].grad = pull
        for optimizer in training.optimizers:
            optimizer.step()
        return progress.mean()

    t.update = update


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
