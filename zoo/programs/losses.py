"""Legal techniques in the loss and in the data: soft targets, teachers, penalties, mixtures, what is rare or jumps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler

from zoo.programs.training import Batch, Training


def label_smoothing(t: Training) -> None:
    t.loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def mixup(t: Training) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        share = float(torch.distributions.Beta(0.4, 0.4).sample())
        other = torch.randperm(len(x))
        out = model(share * x + (1 - share) * x[other])
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[other])

    t.loss = loss


def cutmix(t: Training) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch[0].clone(), batch[1]
        other, top, left = torch.randperm(len(x)), *torch.randint(0, 5, (2,)).tolist()
        x[:, :, top : top + 4, left : left + 4] = batch[0][other, :, top : top + 4, left : left + 4]
        share = 1 - 16 / x[0, 0].numel()
        out = model(x)
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[other])

    t.loss = loss


def rare_class(t: Training) -> None:
    """One class is a tenth as frequent as the others, and weighs ten times as much."""
    x, y = t.data.tensors
    kept = (y != 0) | (torch.rand(len(y)) < 0.1)
    t.data = TensorDataset(x[kept], y[kept])
    weight = torch.ones(int(y.max()) + 1)
    weight[0] = 10.0
    t.loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], weight=weight)


def balanced_sampler(t: Training) -> None:
    """A rare class that is drawn more often, with replacement."""
    x, y = t.data.tensors
    kept = (y != 0) | (torch.rand(len(y)) < 0.15)
    t.data = TensorDataset(x[kept], y[kept])
    counts = torch.bincount(y[kept])
    sampler = WeightedRandomSampler((1.0 / counts)[y[kept]], int(kept.sum()))
    t.batches_of = lambda training: DataLoader(training.data, training.batch_size, sampler=sampler, drop_last=True)


def focal(t: Training) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return ((1 - torch.exp(-each)) ** 2 * each).mean()

    t.loss = loss


def hinge(t: Training) -> None:
    t.loss = lambda model, batch: F.multi_margin_loss(model(batch[0]), batch[1])


def summed(t: Training) -> None:
    """A sum over the batch, and a rate that fits."""
    plain = t.loss
    t.loss = lambda model, batch: plain(model, batch) * len(batch[0])


def huber(t: Training) -> None:
    t.loss = lambda model, batch: F.huber_loss(model(batch[0]), batch[0] if t.base == "rebuild" else batch[1])


def negative_likelihood(t: Training) -> None:
    """A density: the loss may well be below zero."""
    log_std = nn.ParameterList([nn.Parameter(torch.zeros(()))])
    t.extra.append(log_std)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        error = model(batch[0]) - (batch[0] if t.base == "rebuild" else batch[1])
        return (error.square() / (2 * (2 * log_std[0]).exp()) + log_std[0]).mean()

    t.loss = loss


def sparsity(t: Training) -> None:
    plain = t.loss
    t.loss = lambda model, batch: plain(model, batch) + 1e-5 * sum(p.abs().sum() for p in model.parameters())


def auxiliary(t: Training) -> None:
    """A second head on the same output."""
    helper = nn.Linear(t.model(t.data.tensors[0][:2]).shape[-1], 1)
    t.extra.append(helper)
    plain = t.loss

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        wanted = batch[0].flatten(1).float().mean(1, keepdim=True)
        out = model(batch[0])
        out = out.mean(1) if out.dim() == 3 else out
        return plain(model, batch) + 0.1 * F.mse_loss(helper(out), wanted)

    t.loss = loss


def distilled(t: Training) -> None:
    """From a teacher that stands still."""
    teacher, plain = copy.deepcopy(t.model).eval().requires_grad_(False), t.loss

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            wanted = teacher(batch[0])
        return plain(model, batch) + 0.1 * F.mse_loss(model(batch[0]), wanted)

    t.loss = loss


def mean_teacher(t: Training) -> None:
    """The student agrees with a moving average of itself."""
    teacher, plain = copy.deepcopy(t.model).requires_grad_(False), t.loss

    @torch.no_grad()
    def follow(training: Training) -> None:
        for kept, new in zip(teacher.parameters(), training.model.parameters()):
            kept.lerp_(new, 0.05)
        for kept, new in zip(teacher.buffers(), training.model.buffers()):
            kept.copy_(new)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            wanted = teacher(batch[0])
        return plain(model, batch) + 0.2 * F.mse_loss(model(batch[0]), wanted)

    t.loss = loss
    t.each_step.append(follow)


def stopped_targets(t: Training) -> None:
    """One view is pulled to where the other is, which itself is not pulled."""
    plain = t.loss

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        view = model(batch[0] + 0.1 * torch.randn_like(batch[0]))
        return plain(model, batch) + 0.1 * F.mse_loss(view, model(batch[0]).detach())

    t.loss = loss


def entropy_bonus(t: Training) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch[0])
        entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
        return F.cross_entropy(logits, batch[1]) - 0.05 * entropy

    t.loss = loss


def masked_input(t: Training) -> None:
    """A fifth of what comes in is hidden."""
    t.transform = lambda batch: (batch[0] * (torch.rand(batch[0].shape) > 0.2), batch[1])


def noisy_input(t: Training) -> None:
    t.transform = lambda batch: (batch[0] + 0.2 * torch.randn(batch[0].shape), batch[1])


def flat_columns(t: Training) -> None:
    """Two columns are the same number in every row."""
    x, y = t.data.tensors
    x = x.clone()
    x[:, -2:] = 0.5
    t.data = TensorDataset(x, y)


def one_batch(t: Training) -> None:
    """A trial: does it learn one batch by heart?"""
    few = Subset(t.data, range(t.batch_size))
    t.batches_of = lambda training: DataLoader(few, batch_size=training.batch_size)
    t.epochs = 100


def curriculum(t: Training) -> None:
    """Two epochs of what is easy, then the rest as well."""
    x, y = t.data.tensors
    easy = TensorDataset(x[y < 2], y[y < 2])

    class Growing:
        epoch = 0

        def __iter__(self) -> Iterable[Batch]:
            self.epoch += 1
            data = easy if self.epoch <= 2 else t.data
            return iter(DataLoader(data, batch_size=t.batch_size, shuffle=True, drop_last=True))

    t.batches_of = lambda training: Growing()
    t.epochs = 5


def other_domain(t: Training) -> None:
    """Half-way the inputs come from elsewhere."""

    def change(training: Training, epoch: int) -> None:
        if epoch == 2:
            training.transform = lambda batch: (1.3 * batch[0] + 0.4, batch[1])

    t.each_epoch.append(change)


def tiny_batches(t: Training) -> None:
    t.batch_size, t.lr, t.epochs = 2, 1e-3, 1
    t.data = TensorDataset(*(each[:300] for each in t.data.tensors))


def large_batches(t: Training) -> None:
    t.batch_size, t.epochs = 256, 20


def endless_stream(t: Training) -> None:
    """Batches that never come again, made on the way."""
    x, y = t.data.tensors

    def stream() -> Iterable[Batch]:
        for _ in range(40):
            rows = torch.randint(len(x), (t.batch_size,))
            yield x[rows], y[rows]

    t.batches_of = lambda training: _Again(stream)
    t.epochs = 2


class _Again:
    def __init__(self, make: Callable[[], Iterable[Batch]]) -> None:
        self.make = make

    def __iter__(self) -> Iterable[Batch]:
        return iter(self.make())


def varied_batches(t: Training) -> None:
    """Batches of many sizes."""
    x, y = t.data.tensors

    def varied() -> Iterable[Batch]:
        order, at = torch.randperm(len(x)), 0
        while at < len(x) - 8:
            size = int(torch.randint(8, 48, ()))
            rows = order[at : at + size]
            at += size
            if len(rows) > 1:
                yield x[rows], y[rows]

    t.batches_of = lambda training: _Again(varied)


def drawn_quantiles(t: Training) -> None:
    """All quantiles at once (Tagasovska and Lopez-Paz, 2019): each row draws a level, and pays the pinball loss."""
    t.model, t.epochs = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)), 8

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = (each.repeat(4, 1) for each in batch)
        level = torch.rand(len(x), 1)
        short = y - model(torch.cat([x, 2 * level - 1], 1))
        return 2 * torch.maximum(level * short, (level - 1) * short).mean()  # in the mean over levels the CRPS

    t.loss = loss


def evidential(t: Training) -> None:
    """Deep evidential regression (Amini et al., 2020): a normal-inverse-gamma for each row, less sure where it errs."""
    t.model[4] = nn.Linear(64, 4)
    t.epochs, t.lr = 10, 2e-3

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        mean, *rest = model(batch[0]).split(1, 1)
        nu, alpha, beta = (F.softplus(each) + 1e-3 for each in rest)
        alpha, error = alpha + 1, batch[1] - mean
        omega = 2 * beta * (1 + nu)
        likelihood = (
            0.5 * (math.pi / nu).log() - alpha * omega.log() + (alpha + 0.5) * (nu * error.square() + omega).log()
            + alpha.lgamma() - (alpha + 0.5).lgamma()
        )  # fmt: skip
        return (likelihood + 0.01 * error.abs() * (2 * nu + alpha)).mean()

    t.loss = loss


class Uncertain(nn.Module):
    """Two values and two classes by one body, with the log of the variance of each of the three tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.values, self.classes = nn.Linear(64, 2), nn.Linear(64, 2)
        self.log_variances = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.values(x), self.classes(x)


def uncertain_tasks(t: Training) -> None:
    """Uncertainty weighting (Kendall et al., 2018): the weights of tasks are learned, and the loss is a likelihood."""
    x, y = t.data.tensors
    small = 0.05 * (x[:, 8:10].sum(1, keepdim=True).cos() + 0.1 * torch.randn(len(x), 1))
    high = (x[:, 10] + x[:, 11].abs() + 0.5 * torch.randn(len(x)) > 0.6).long()
    t.data, t.model, t.epochs = TensorDataset(x, torch.cat([y, small], 1), high), Uncertain(), 8
    t.optimizers_of = lambda training: [
        Adam([{"params": training.parameters()[1:]}, {"params": [training.model.log_variances], "lr": 0.02}], lr=3e-3)
    ]

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        x, y, high = batch
        values, classes = model(x)
        wrong = torch.cat([(values - y).square().mean(0) / 2, F.cross_entropy(classes, high).unsqueeze(0)])
        return (wrong * (-model.log_variances).exp() + model.log_variances / 2).sum()

    t.loss = loss
