"""Legal ways to learn a density or a bound: flows, chains that go on, energies, scores, critics."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

from zoo.hosts.worlds import points
from zoo.programs.training import Batch, Training


def _in_the_plane(t: Training) -> None:
    """The data are points around three modes."""
    t.data = TensorDataset(points(t.seed, 1024), torch.zeros(1024))


class Coupling(nn.Module):
    """One coordinate is scaled and moved by what the other says."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = x[:, self.first], x[:, 1 - self.first]
        log_scale, shift = self.net(kept.unsqueeze(1)).unbind(1)
        log_scale = log_scale.tanh()
        moved = moved * log_scale.exp() + shift
        return torch.stack([kept, moved] if self.first == 0 else [moved, kept], 1), log_scale


class Flow(nn.Module):
    """The log-density of points (n, 2), by the change of variables."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.couplings = nn.ModuleList([Coupling(number % 2) for number in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        log_det = torch.zeros(len(x))
        for coupling in self.couplings:
            x, more = coupling(x)
            log_det = log_det + more
        return log_det - x.square().sum(1) / 2 - math.log(2 * math.pi)


def coupling_flow(t: Training) -> None:
    """Real NVP (Dinh et al., 2017): a normalising flow of affine couplings, by maximum likelihood."""
    _in_the_plane(t)
    t.model, t.epochs = Flow(), 8
    t.loss = lambda model, batch: -model(batch[0]).mean()


class Restricted(nn.Module):
    """A restricted Boltzmann machine; ``forward`` is the free energy of visible units (n, visible)."""

    def __init__(self, visible: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.05 * torch.randn(hidden, visible))
        self.visible, self.hidden = nn.Parameter(torch.zeros(visible)), nn.Parameter(torch.zeros(hidden))

    def forward(self, v: Tensor) -> Tensor:
        return -(v @ self.visible) - F.softplus(F.linear(v, self.weight, self.hidden)).sum(1)

    def means(self, v: Tensor) -> Tensor:
        """Of the visible units, one drawing of the hidden ones later."""
        h = torch.bernoulli(torch.sigmoid(F.linear(v, self.weight, self.hidden)))
        return torch.sigmoid(F.linear(h, self.weight.T, self.visible))


def persistent_chain(t: Training) -> None:
    """Persistent contrastive divergence (Tieleman, 2008): the chains of a step go on in the next one."""
    t.model, t.epochs = Restricted(64, 32), 12
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.05)]
    chain = torch.bernoulli(torch.full((64, 64), 0.5))

    def update(training: Training, batch: Batch) -> Tensor:
        nonlocal chain
        (optimizer,) = training.optimizers
        v = (batch[0].flatten(1) > 0).float()
        with torch.no_grad():
            for _ in range(3):
                chain = torch.bernoulli(training.model.means(chain))
        optimizer.zero_grad()
        (training.model(v).mean() - training.model(chain).mean()).backward()
        optimizer.step()
        with torch.no_grad():
            return F.binary_cross_entropy(training.model.means(v).clamp(1e-6, 1 - 1e-6), v)

    t.update = update


def energy_distance(one: Tensor, other: Tensor) -> Tensor:
    """Between two sets of points; 0 where they are of one distribution (Székely and Rizzo, 2013)."""
    return 2 * torch.cdist(one, other).mean() - torch.cdist(one, one).mean() - torch.cdist(other, other).mean()


def langevin(t: Training) -> None:
    """An energy-based model by short Langevin chains out of a replay buffer (Du and Mordatch, 2019)."""
    _in_the_plane(t)
    t.model = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    t.epochs, t.lr, t.batch_size = 20, 1e-3, 64
    buffer = 4 * torch.rand(1000, 2) - 2

    def sample(model: nn.Module, x: Tensor) -> Tensor:
        for _ in range(20):
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x)
            x = x - 0.05 * slope + 0.1 * torch.randn_like(x)
        return x.detach()

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,) = training.optimizers
        rows = torch.randint(len(buffer), (len(batch[0]),))
        begin = buffer[rows]
        again = torch.rand(len(begin)) < 0.05
        begin[again] = 4 * torch.rand(int(again.sum()), 2) - 2
        buffer[rows] = false = sample(training.model, begin)
        real, made = training.model(batch[0]), training.model(false)
        optimizer.zero_grad()
        (real.mean() - made.mean() + 0.1 * (real.square() + made.square()).mean()).backward()
        optimizer.step()
        return energy_distance(batch[0], buffer)

    t.update = update


def sliced_scores(t: Training) -> None:
    """Sliced score matching (Song et al., 2019): the trace of the Jacobian along drawn directions."""
    _in_the_plane(t)
    t.model, t.epochs = nn.Sequential(nn.Linear(2, 64), nn.Softplus(), nn.Linear(64, 64), nn.Softplus()), 8
    t.model.append(nn.Linear(64, 2))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch[0].repeat(4, 1).requires_grad_()
        scores, along = model(x), torch.randn_like(x)
        (bend,) = torch.autograd.grad((scores * along).sum(), x, create_graph=True)
        return ((bend * along).sum(1) + scores.square().sum(1) / 2).mean()

    t.loss = loss


def mutual_information(t: Training) -> None:
    """MINE (Belghazi et al., 2018): a bound on what x tells of y; a running mean takes the bias off its gradient."""
    x, noise = torch.randn(2, 2048, 1)
    t.data = TensorDataset(x, 0.9 * x + 0.19**0.5 * noise)  # 0.83 nats
    t.model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    t.epochs, t.batch_size, t.lr, running = 8, 128, 1e-3, 1.0

    def update(training: Training, batch: Batch) -> Tensor:
        nonlocal running
        x, y = batch
        together = training.model(torch.cat([x, y], 1)).mean()
        apart = training.model(torch.cat([x, y[torch.randperm(len(y))]], 1)).exp().mean()
        running = 0.95 * running + 0.05 * float(apart.detach())
        (optimizer,) = training.optimizers
        optimizer.zero_grad()
        (apart / running - together).backward()
        optimizer.step()
        return (apart.log() - together).detach()

    t.update = update


def relativistic(t: Training) -> None:
    """A relativistic average GAN (Jolicoeur-Martineau, 2019): is a true point truer than the mean false one?"""
    t.data = TensorDataset(points(t.seed, 2048), torch.zeros(2048))
    t.model, critic = (
        nn.Sequential(nn.Linear(into, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, out))
        for into, out in ((4, 2), (2, 1))
    )
    t.extra.append(critic)
    t.epochs, t.batch_size = 24, 128
    t.optimizers_of = lambda training: [
        Adam(each.parameters(), lr=lr, betas=(0.0, 0.99)) for each, lr in ((training.model, 1e-3), (critic, 1e-3))
    ]

    def duel(winner: Tensor, loser: Tensor) -> Tensor:
        return (F.softplus(loser.mean() - winner) + F.softplus(loser - winner.mean())).mean()

    def update(training: Training, batch: Batch) -> Tensor:
        to_make, to_judge = training.optimizers
        real = batch[0]
        made = training.model(torch.randn(len(real), 4))
        to_judge.zero_grad()
        duel(critic(real), critic(made.detach())).backward()
        to_judge.step()
        to_make.zero_grad()
        duel(critic(made), critic(real)).backward()
        to_make.step()
        return energy_distance(real, made.detach())

    t.update = update
