"""Legal techniques with few labels, none, or unequal groups: pseudo-labels, smooth answers, cached contrasts."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.utils.data import TensorDataset

from zoo.host import mlp
from zoo.programs.training import Batch, Training


def pseudo_labels(t: Training) -> None:
    """FixMatch (Sohn et al., 2020): sure answers on a weak view are the labels of a strong one."""
    x, y = t.data.tensors
    labelled = torch.cat([(y == label).nonzero().flatten()[:6] for label in range(4)])
    known_x, known_y = x[labelled], y[labelled]
    t.epochs, t.batch_size = 12, 64

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        unknown = batch[0]
        weak = unknown + 0.1 * torch.randn_like(unknown)
        strong = (unknown + 0.5 * torch.randn_like(unknown)) * (torch.rand(len(unknown), 1, 8, 8) > 0.2)
        with_noise = known_x + 0.1 * torch.randn_like(known_x)
        seen, on_weak, on_strong = model(torch.cat([with_noise, weak, strong])).split([24, 64, 64])
        sure, guessed = on_weak.detach().softmax(1).max(1)
        each = F.cross_entropy(on_strong, guessed, reduction="none")
        return F.cross_entropy(seen, known_y) + (each * (sure > 0.9)).mean()

    t.loss = loss


def virtual_adversarial(t: Training) -> None:
    """Virtual adversarial training (Miyato et al., 2018): smooth where the answer would change the most."""

    def divergence(model: nn.Module, x: Tensor, log_p: Tensor) -> Tensor:
        return F.kl_div(model(x).log_softmax(1), log_p, reduction="batchmean", log_target=True)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        logits = model(x)
        log_p = logits.detach().log_softmax(1)
        along = F.normalize(torch.randn_like(x), dim=1).requires_grad_()
        (slope,) = torch.autograd.grad(divergence(model, x + 1e-2 * along, log_p), along)
        worst = F.normalize(slope, dim=1)
        return F.cross_entropy(logits, y) + divergence(model, x + 0.5 * worst, log_p)

    t.loss, t.epochs = loss, 8


def cached_contrast(t: Training) -> None:
    """GradCache (Gao et al., 2021): a contrast over a large batch, whose parts go through the model one by one."""
    t.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
    t.batch_size, t.epochs = 120, 20

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,) = training.optimizers
        parts = [
            [part * (torch.rand_like(part) > 0.3) for part in batch[0].split(50)] for _ in range(2)
        ]  # 50, 50 and 20 rows of either view
        with torch.no_grad():
            cached = [torch.cat([training.model(part) for part in view]) for view in parts]
        cached = [view.requires_grad_() for view in cached]
        one, other = (F.normalize(view, dim=1) for view in cached)
        loss = F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))
        slopes = torch.autograd.grad(loss, cached)
        optimizer.zero_grad()
        for view, slope in zip(parts, slopes):
            for part, gradient in zip(view, slope.split(50)):
                training.model(part).backward(gradient)
        optimizer.step()
        return loss.detach()

    t.update = update


def group_robust(t: Training) -> None:
    """Group DRO (Sagawa et al., 2020): the groups with the larger losses come to weigh more."""
    x, y = t.data.tensors
    high = (y > 4).long()
    agrees = torch.rand(len(y)) < 0.8
    sign = torch.where(agrees, high, 1 - high)  # what four rows of five can be told by
    x = torch.cat([x[:, :19], 2.0 * sign.unsqueeze(1) - 1.0 + 0.1 * torch.randn(len(y), 1)], 1)
    t.data = TensorDataset(x, 2 * high + sign)
    t.epochs, t.batch_size, groups = 10, 64, torch.full((4,), 0.25)
    t.optimizers_of = lambda training: [Adam(training.parameters(), lr=training.lr, weight_decay=1e-2)]
    t.model[4] = nn.Linear(64, 2)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        each = F.cross_entropy(model(batch[0]), batch[1] // 2, reduction="none")
        member = F.one_hot(batch[1], 4).float()
        means = member.T @ each / member.sum(0).clamp(min=1)
        groups.mul_((0.05 * means.detach()).exp())
        groups.div_(groups.sum())
        return (groups * means).sum()

    t.loss = loss


def co_teaching(t: Training) -> None:
    """Co-teaching (Han et al., 2018): with wrong labels, each of two models learns from what the other finds easy."""
    x, y = t.data.tensors
    wrong = torch.rand(len(y)) < 0.4
    t.data = TensorDataset(x, torch.where(wrong, torch.randint(10, y.shape), y))
    other = mlp()
    t.extra.append(other)
    t.epochs, t.batch_size = 10, 64
    t.optimizers_of = lambda training: [Adam(each.parameters(), lr=t.lr) for each in (training.model, other)]

    def update(training: Training, batch: Batch) -> Tensor:
        epoch = training.steps * training.batch_size / len(training.data)
        kept = int(len(batch[0]) * (1 - 0.36 * min(epoch / 4, 1.0)))
        one, two = (F.cross_entropy(model(batch[0]), batch[1], reduction="none") for model in (training.model, other))
        easy_for_one, easy_for_two = (each.detach().argsort()[:kept] for each in (one, two))
        loss = one[easy_for_two].mean() + two[easy_for_one].mean()
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in training.optimizers:
            optimizer.step()
        return loss.detach()

    t.update = update


def momentum_contrast(t: Training) -> None:
    """MoCo (He et al., 2020): keys come from a slow copy of the encoder, and wait in a queue to be negatives."""
    t.model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 32),
    )  # fmt: skip
    slow = copy.deepcopy(t.model).requires_grad_(False)
    queue, t.epochs = F.normalize(torch.randn(256, 32), dim=1), 30

    def view(x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) > 0.3) + 0.1 * torch.randn_like(x)

    def update(training: Training, batch: Batch) -> Tensor:
        nonlocal queue
        (optimizer,) = training.optimizers
        query = F.normalize(training.model(view(batch[0])), dim=1)
        with torch.no_grad():
            for kept, new in zip(slow.parameters(), training.model.parameters()):
                kept.lerp_(new, 0.05)
            keys = F.normalize(slow(view(batch[0])), dim=1)
        logits = torch.cat([(query * keys).sum(1, keepdim=True), query @ queue.T], 1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue = torch.cat([keys, queue])[:256]
        return loss.detach()

    t.update = update
