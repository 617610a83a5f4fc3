"""Legal techniques on sets: pixels of a class, known points, hard rows, members, kept weights, clusters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.data import TensorDataset

from zoo.programs.nested import waves
from zoo.programs.places import bodies
from zoo.programs.training import Batch, Training


def _blocks(n: int, size: int = 12) -> Batch:
    """Noisy pictures (n, 1, size, size) of a bright block and a dark one, and which of three each pixel shows."""
    labels, at = torch.zeros(n, size, size, dtype=torch.long), torch.arange(size)
    for kind in (1, 2):
        low = torch.randint(size - 4, (n, 2, 1))
        inside = (at >= low) & (at < low + torch.randint(3, 5, (n, 2, 1)))
        labels[inside[:, 0, :, None] & inside[:, 1, None, :]] = kind
    return (torch.tensor([0.0, 1.0, -1.0])[labels] + 0.7 * torch.randn(n, size, size)).unsqueeze(1), labels


def overlap(t: Training) -> None:
    """Lovász-Softmax (Berman et al., 2018): the extension of one minus the intersection over union, by sorted error."""
    t.data = TensorDataset(*_blocks(512))
    t.model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 1)
    )
    t.epochs = 6

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        shares = model(batch[0]).softmax(1).transpose(0, 1).flatten(1)  # (classes, pixels)
        truth, each = batch[1].flatten(), []
        for kind in truth.unique().tolist():
            here = (truth == kind).float()
            errors, order = (here - shares[kind]).abs().sort(descending=True)
            here = here[order]
            jaccard = 1 - (here.sum() - here.cumsum(0)) / (here.sum() + (1 - here).cumsum(0))
            each.append(errors @ jaccard.diff(prepend=torch.zeros(1)))
        return torch.stack(each).mean()

    t.loss = loss


class NeuralProcess(nn.Module):
    """A function of which some points are known: they are averaged into a distribution of what stands for all of it."""

    def __init__(self, width: int = 64, latent: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.latent = nn.Linear(width, 2 * latent)
        self.decoder = nn.Sequential(nn.Linear(latent + 1, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.out = nn.Linear(width, 2)

    def known(self, x: Tensor, y: Tensor) -> Normal:
        mean, spread = self.latent(self.encoder(torch.cat([x, y], 2)).mean(1)).chunk(2, 1)
        return Normal(mean, 0.1 + 0.9 * spread.sigmoid())

    def forward(self, z: Tensor, x: Tensor) -> Normal:
        z = z.unsqueeze(1).expand(-1, x.shape[1], -1)
        mean, spread = self.out(self.decoder(torch.cat([z, x], 2))).chunk(2, 2)
        return Normal(mean, 0.1 + 0.9 * F.softplus(spread))


def neural_process(t: Training) -> None:
    """Neural processes (Garnelo et al., 2018): what some points say of a function is kept near what all of them say."""
    x, y = (torch.stack(each) for each in zip(*(waves() for _ in range(2048))))
    t.data, t.model, t.epochs = TensorDataset(x / 5, y), NeuralProcess(), 12

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        some = torch.randperm(x.shape[1])[: int(torch.randint(3, 11, ()))]
        before, after = model.known(x[:, some], y[:, some]), model.known(x, y)
        likelihood = model(after.rsample(), x).log_prob(y).sum((1, 2))
        return (kl_divergence(after, before).sum(1) - likelihood).mean() / x.shape[1]

    t.loss = loss


def hard_examples(t: Training) -> None:
    """Online hard example mining (Shrivastava et al., 2016): all rows go forward, the quarter with most loss learns."""
    t.batch_size, t.epochs = 64, 10
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)]

    def update(training: Training, batch: Batch) -> Tensor:
        x, y = batch
        with torch.no_grad():
            each = F.cross_entropy(training.model(x), y, reduction="none")
        hard = each.topk(len(x) // 4).indices
        (optimizer,) = training.optimizers
        optimizer.zero_grad()
        F.cross_entropy(training.model(x[hard]), y[hard]).backward()
        optimizer.step()
        return each.mean()

    t.update = update


class RankOneMembers(nn.Module):
    """A linear layer with one weight for all members; each has a vector for the inputs, one for the outputs, a bias."""

    def __init__(self, layer: nn.Linear, members: int) -> None:
        super().__init__()
        self.members, self.shared = members, nn.Linear(layer.in_features, layer.out_features, bias=False)
        self.before = nn.Parameter(torch.randn(members, 1, layer.in_features).sign())
        self.behind = nn.Parameter(torch.randn(members, 1, layer.out_features).sign())
        self.bias = nn.Parameter(torch.zeros(members, 1, layer.out_features))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(0, (self.members, -1))
        return (self.shared(x * self.before) * self.behind + self.bias).flatten(0, 1)


def batch_ensemble(t: Training) -> None:
    """BatchEnsemble (Wen et al., 2020): four members in one pass, which differ by vectors around a shared weight."""
    for number in (0, 2, 4):
        t.model[number] = RankOneMembers(t.model[number], 4)
    t.epochs = 8

    def groups(training: Training) -> list[Optimizer]:
        shared = [p for name, p in training.model.named_parameters() if "shared" in name]
        fast = [p for name, p in training.model.named_parameters() if "shared" not in name]
        return [AdamW([{"params": shared, "weight_decay": 1e-2}, {"params": fast, "weight_decay": 0.0}])]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x.repeat(4, 1)), y.repeat(4))

    t.optimizers_of, t.loss = groups, loss


class KeptByScore(torch.autograd.Function):
    """1 where a score is among the largest; the scores get the gradient of the mask as it is."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, scores: Tensor, share: float) -> Tensor:
        kept = scores.flatten().topk(max(1, round(share * scores.numel()))).indices
        return torch.zeros_like(scores).flatten().index_fill(0, kept, 1.0).view_as(scores)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Moving(nn.Module):
    """A parametrisation: the weights whose scores are largest, which are those that move away from zero."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.scores, self.share = nn.Parameter(torch.zeros_like(weight)), 1.0

    def forward(self, weight: Tensor) -> Tensor:
        return weight * KeptByScore.apply(self.scores, self.share)


def movement_pruning(t: Training) -> None:
    """Movement pruning (Sanh et al., 2020): a pretrained model is tuned; the weights that shrink meanwhile are cut."""
    x, y = t.data.tensors
    first = Adam(t.model.parameters(), lr=3e-3)
    for rows in [each for _ in range(6) for each in torch.randperm(len(x)).split(32)]:  # another task: pairs of classes
        first.zero_grad()
        F.cross_entropy(t.model(x[rows]), y[rows] // 2).backward()
        first.step()
    t.model[4] = nn.Linear(64, 10)
    layers = [layer for _, _, layer in bodies(t.model)]
    masks = [Moving(layer.weight) for layer in layers]
    for mask, layer in zip(masks, layers):
        parametrize.register_parametrization(layer, "weight", mask)
    t.epochs = 10

    def groups(training: Training) -> list[Optimizer]:
        scores = [mask.scores for mask in masks]
        rest = [p for p in training.parameters() if all(p is not each for each in scores)]
        return [Adam([{"params": rest, "lr": 2e-3}, {"params": scores, "lr": 1e-2}])]

    def tighten(training: Training) -> None:
        done = min(1.0, training.steps / (0.7 * training.epochs * 32))
        for mask in masks:
            mask.share = 0.2 + 0.8 * (1 - done) ** 3

    t.optimizers_of = groups
    t.each_step.append(tighten)


def _cluster(found: Tensor, number: int) -> Tensor:
    """Which cluster each row belongs to, after whitening."""
    found = found - found.mean(0)
    values, vectors = torch.linalg.eigh(found.T.cov())
    found = F.normalize(found @ vectors[:, -12:] / values[-12:].clamp(min=1e-6).sqrt(), dim=1)
    means = found[torch.randperm(len(found))[:number]]
    for _ in range(20):
        nearest = torch.cdist(found, means).argmin(1)
        for each in range(number):
            here = found[nearest == each]
            means[each] = here.mean(0) if len(here) else found[torch.randint(len(found), ())]
    return nearest


def clustered(t: Training) -> None:
    """DeepCluster (Caron et al., 2018): the clusters of what the network makes of pictures are its next labels."""
    pictures = t.data.tensors[0]
    t.data, labels = TensorDataset(pictures, torch.arange(len(pictures))), torch.zeros(len(pictures), dtype=torch.long)
    t.model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    )
    t.model.extend([nn.Linear(256, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8)])
    t.epochs = 12
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)]

    def name_anew(training: Training, epoch: int) -> None:
        training.model.eval()
        with torch.no_grad():
            labels.copy_(_cluster(training.model[:-1](pictures), 8))
        training.model.train()
        training.model[-1].reset_parameters()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, rows = batch
        moved = torch.roll(x, tuple(torch.randint(-1, 2, (2,)).tolist()), (2, 3)) + 0.2 * torch.randn_like(x)
        rare = 1 / labels.bincount(minlength=8).clamp(min=1)
        return F.cross_entropy(model(moved), labels[rows], weight=rare)

    t.each_epoch.append(name_anew)
    t.loss = loss
