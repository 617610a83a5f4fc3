"""Losses, layers and data that nobody may look at while laws are written: they are measured at the end."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

from zoo.hosts.worlds import MODES
from zoo.programs.agents import Board
from zoo.programs.training import Batch, Training


class Sparsemax(torch.autograd.Function):
    """The nearest point of the simplex, by the last dimension; its Jacobian is written by hand."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ordered = x.sort(-1, descending=True).values
        above = ordered.cumsum(-1) - 1
        count = torch.arange(1, x.shape[-1] + 1)
        size = (count * ordered > above).sum(-1, keepdim=True)
        p = (x - above.gather(-1, size - 1) / size).clamp(min=0)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        (p,) = ctx.saved_tensors
        held = (p > 0).to(p.dtype)
        return held * (gradient - (held * gradient).sum(-1, keepdim=True) / held.sum(-1, keepdim=True))


class SparseReader(nn.Module):
    """Reads a series, and looks at few of its places."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.key = nn.GRU(1, 24, batch_first=True), nn.Linear(24, 1)
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        states = self.cell(x)[0]
        shares = Sparsemax.apply(self.key(states).squeeze(2))
        return self.head(self.norm((shares.unsqueeze(2) * states).sum(1)))


def sparse_shares(t: Training) -> None:
    """Sparsemax (Martins and Astudillo, 2016): attention with zeros, and a loss whose gradient is a difference."""
    t.model, t.epochs = SparseReader(), 10

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        z, wanted = model(x), F.one_hot(y, 4).float()
        p = Sparsemax.apply(z).detach()  # at the maximum of p z - p p / 2, so it has no share in the gradient
        return ((p - wanted) * z).sum(1).mean() + (1 - p.square().sum(1)).mean() / 2

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


def returns_in_quantiles(t: Training) -> None:
    """QR-DQN (Dabney et al., 2018): a value is a distribution, of which quantiles are learned against quantiles."""
    t.model, t.epochs = nn.Sequential(nn.Linear(25, 64), nn.ReLU(), nn.Linear(64, 4 * 16), nn.Unflatten(1, (4, 16))), 5
    slow, board = copy.deepcopy(t.model).requires_grad_(False), Board(16)
    t.optimizers_of = lambda training: [Adam(training.parameters(), lr=3e-3, eps=0.01 / 32)]
    levels = (torch.arange(16) + 0.5) / 16

    def play(training: Training) -> Iterator[Tensor]:
        (optimizer,), memory = training.optimizers, []
        for step in range(100 * training.epochs):
            if step % 25 == 0:
                slow.load_state_dict(training.model.state_dict())
            before = board.seen()
            with torch.no_grad():
                best = training.model(before).mean(2).argmax(1)
            actions = torch.where(torch.rand(16) < max(0.05, 1 - step / 120), torch.randint(4, (16,)), best)
            reward, arrived = board.step(actions)
            memory = [*memory, (before, actions, reward, arrived, board.seen())][-300:]
            replayed = [memory[number] for number in torch.randint(len(memory), (6,)).tolist()]
            seen, taken, paid, done, after = (torch.cat(each) for each in zip(*replayed))
            with torch.no_grad():
                ahead = slow(after)
                ahead = ahead[torch.arange(len(after)), ahead.mean(2).argmax(1)]
                target = paid.unsqueeze(1) + 0.95 * (1 - done).unsqueeze(1) * ahead
            quantiles = training.model(seen)[torch.arange(len(seen)), taken]
            error = target.unsqueeze(1) - quantiles.unsqueeze(2)  # (rows, quantiles, targets)
            bent = F.huber_loss(error, torch.zeros_like(error), reduction="none")
            loss = ((levels.unsqueeze(1) - (error < 0).float()).abs() * bent).mean(2).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield -reward.mean()

    t.loop, t.loaded = play, False


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


def _noised(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What has become of x (n, 2) at random times, the times (n, 1), and the noise (n, 2)."""
    time, noise = 0.02 + 0.96 * torch.rand(len(x), 1), torch.randn_like(x)
    return (time * torch.pi / 2).cos() * x + (time * torch.pi / 2).sin() * noise, time, noise


def distilled_scores(t: Training) -> None:
    """Score distillation (Poole et al., 2023): what a frozen diffusion model would correct is the gradient."""
    denoiser = nn.Sequential(nn.Linear(6, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
    first = Adam(denoiser.parameters(), lr=5e-3)
    for _ in range(600):
        kind = torch.randint(3, (128,))
        noisy, time, noise = _noised(MODES[kind] + 0.12 * torch.randn(128, 2))
        wish = F.one_hot(kind, 3) * (torch.rand(128, 1) > 0.15)
        first.zero_grad()
        F.mse_loss(denoiser(torch.cat([noisy, time, wish], 1)), noise).backward()
        first.step()
    denoiser.requires_grad_(False)
    t.model, t.lr = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 2)), 3e-3

    def draw(training: Training) -> Iterator[Tensor]:
        (optimizer,) = training.optimizers
        for _ in range(75 * training.epochs):
            wish = F.one_hot(torch.randint(3, (64,)), 3).float()
            x = training.model(torch.cat([wish, torch.randn(64, 2)], 1))
            with torch.no_grad():
                noisy, time, noise = _noised(x)
                free, led = (denoiser(torch.cat([noisy, time, each], 1)) for each in (0 * wish, wish))
                wrong = free + 1.5 * (led - free) - noise
                force = (time * torch.pi / 2).sin().square() * wrong
            optimizer.zero_grad()
            x.backward(force / len(x))  # not through the denoiser
            optimizer.step()
            yield force.square().sum(1).mean()

    t.loop, t.loaded = draw, False
