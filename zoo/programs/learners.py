"""Ways to learn that are rarely seen: by flows on a graph, orbits, errors fed into the input, clusters, programs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import TensorDataset

from zoo.programs.training import Batch, Training


class WaveFunction(nn.Module):
    """The logarithm of the amplitude of two particles on a line (walkers, 2), the same when they change places."""

    def __init__(self) -> None:
        super().__init__()
        self.width = nn.Parameter(torch.tensor(1.5))
        self.body = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        features = torch.stack([x.sum(1), x.prod(1), (x[:, 0] - x[:, 1]).square()], 1)
        return self.body(features).squeeze(1) - F.softplus(self.width) * x.square().sum(1)


def _local_energy(wave: nn.Module, x: Tensor) -> Tensor:
    """In a harmonic trap, with a soft repulsion between the particles (walkers,)."""
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(wave(x).sum(), x, create_graph=True)
    bends = [torch.autograd.grad(slope[:, i].sum(), x, retain_graph=i == 0)[0][:, i] for i in range(2)]
    kinetic = -(bends[0] + bends[1] + slope.detach().square().sum(1)) / 2
    x = x.detach()
    return kinetic + x.square().sum(1) / 2 + 1 / (1 + (x[:, 0] - x[:, 1]).square()).sqrt()


def variational_monte_carlo(t: Training) -> None:
    """Variational Monte Carlo (Carleo and Troyer, 2017; Pfau et al., 2020): walkers follow the squared amplitude.

    The gradient is the covariance of local energy and logarithm; energies far from the median are clipped.
    """
    t.model, t.loaded = WaveFunction(), False
    t.scheduler_of = lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step / 200))
    t.optimizers_of = lambda training: [Adam(training.parameters(), lr=1e-2)]
    deviations: list[float] = []

    @torch.no_grad()
    def walk(wave: nn.Module, x: Tensor, moves: int) -> Tensor:
        now = wave(x)
        for _ in range(moves):
            there = x + 0.8 * torch.randn_like(x)
            then = wave(there)
            taken = torch.rand(len(x)) < (2 * (then - now)).exp()
            x, now = torch.where(taken[:, None], there, x), torch.where(taken, then, now)
        return x

    def lower(training: Training) -> Iterator[Tensor]:
        (optimizer,), wave, schedule = training.optimizers, training.model, training.scheduler
        assert schedule is not None
        walkers = walk(wave, torch.randn(256, 2), 100)
        for step in range(250):
            walkers = walk(wave, walkers, 8)
            energy = _local_energy(wave, walkers.clone())
            middle = energy.median()
            reach = 5 * (energy - middle).abs().mean()
            clipped = energy.clamp(middle - reach, middle + reach)
            optimizer.zero_grad()
            (2 * (clipped - clipped.mean()) * wave(walkers)).mean().backward()
            optimizer.step()
            schedule.step()
            if step % 50 == 0:
                deviations.append(float(energy.std()))
            yield energy.mean()

    t.loop = lower


class EccentricAnomaly(torch.autograd.Function):
    """Solves Kepler's equation E - e sin E = M by Newton's method; its derivatives come of the equation itself."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, eccentricity: Tensor) -> Tensor:
        anomaly = mean + eccentricity * mean.sin()
        for _ in range(8):
            excess = anomaly - eccentricity * anomaly.sin() - mean
            anomaly = anomaly - excess / (1 - eccentricity * anomaly.cos())
        ctx.save_for_backward(anomaly, eccentricity)
        return anomaly

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        anomaly, eccentricity = ctx.saved_tensors
        by_mean = grads[0] / (1 - eccentricity * anomaly.cos())
        return by_mean, by_mean * anomaly.sin()


def _velocities(amplitude: Tensor, eccentricity: Tensor, direction: Tensor, phase: Tensor) -> Tensor:
    """Of a star that a planet pulls, at 16 times of one period; all arguments are (n, 1)."""
    mean = phase + torch.arange(16) * (2 * math.pi / 16)
    half = EccentricAnomaly.apply(mean, eccentricity.expand_as(mean)) / 2
    up, down = (1 + eccentricity).sqrt() * half.sin(), (1 - eccentricity).sqrt() * half.cos()
    return amplitude * ((2 * torch.atan2(up, down) + direction).cos() + eccentricity * direction.cos())


def kepler_orbits(t: Training) -> None:
    """Amortised orbit fits (radial velocities): a network reads the elements, Kepler's equation draws the curve."""
    n = 640
    orbits = (0.5 + torch.rand(n, 1), 0.6 * torch.rand(n, 1), 6.28 * torch.rand(n, 1), 6.28 * torch.rand(n, 1))
    seen = _velocities(*orbits)
    t.data = TensorDataset(seen + 0.05 * torch.randn_like(seen), orbits[1])
    t.model = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 5))
    t.epochs = 30
    t.scheduler_of = lambda optimizer: CosineAnnealingLR(optimizer, t.epochs * (n // t.batch_size))
    errors: list[float] = []

    def elements(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The eccentricity as a vector toward the periastron, and the longitude: smooth where an orbit is a circle."""
        raw = model(x).split(1, dim=1)
        eccentricity = 0.9 * (raw[1].square() + raw[2].square() + 1e-6).sqrt().tanh()
        direction = torch.atan2(raw[2], raw[1])
        return F.softplus(raw[0]), eccentricity, direction, torch.atan2(raw[4], raw[3]) - direction

    def misfit(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(_velocities(*elements(model, batch[0])), batch[0])

    @torch.no_grad()
    def compare(training: Training, epoch: int) -> None:
        x, eccentricity = training.data.tensors
        errors.append(float((elements(training.model, x)[1] - eccentricity).abs().mean()))

    t.loss = misfit
    t.each_epoch.append(compare)


class Walker(nn.Module):
    """How to go on from a place of the grid (right, up, stay), whence one came (left, below), and the total flow."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side
        self.body = nn.Sequential(nn.Linear(2 * side, 64), nn.LeakyReLU(), nn.Linear(64, 64), nn.LeakyReLU())
        self.ahead, self.back = nn.Linear(64, 3), nn.Linear(64, 2)
        self.log_total = nn.Parameter(torch.zeros(()))

    def forward(self, at: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(F.one_hot(at, self.side).flatten(1).float())
        edge = F.pad(at == self.side - 1, (0, 1))
        ahead = self.ahead(hidden).masked_fill(edge, -1e9).log_softmax(1)
        return ahead, self.back(hidden).masked_fill(at == 0, -1e9).log_softmax(1)


def trajectory_balance(t: Training) -> None:
    """A GFlowNet on a grid with four hills (Malkin et al., 2022): ends are drawn in proportion to their reward."""
    side, t.loaded = 8, False
    model = Walker(side)
    t.model = model
    layers = [p for p in model.parameters() if p is not model.log_total]
    groups: list[dict[str, Any]] = [{"params": layers}, {"params": [model.log_total], "lr": 0.1}]
    t.optimizers_of = lambda training: [Adam(groups, lr=5e-3)]
    distances: list[float] = []

    def reward(at: Tensor) -> Tensor:
        far = (2 * at / (side - 1) - 1).abs()
        return 0.05 + 0.5 * (far > 0.4).all(1).float() + 2 * ((far > 0.5) & (far < 0.8)).all(1).float()

    def draw(rows: int, random: float) -> tuple[Tensor, Tensor]:
        """Where walks end, and by how much each is out of balance."""
        at, walking = torch.zeros(rows, 2, dtype=torch.long), torch.ones(rows, dtype=torch.bool)
        balance, (ahead, _) = model.log_total.expand(rows), model(at)
        for _ in range(2 * side - 1):
            chances = ahead.detach().exp()
            possible = (chances > 0).float()
            chances = (1 - random) * chances + random * possible / possible.sum(1, keepdim=True)
            move = torch.multinomial(chances, 1)
            balance = balance + torch.where(walking, ahead.gather(1, move).squeeze(1), 0.0)
            walking = walking & (move.squeeze(1) < 2)
            at = torch.where(walking[:, None], at + F.one_hot(move.squeeze(1), 3)[:, :2], at)
            ahead, back = model(at)
            came = back.gather(1, move.clamp(max=1)).squeeze(1)
            balance = balance - torch.where(walking, came, 0.0)
        return at, balance - reward(at).log()

    @torch.no_grad()
    def distance() -> float:
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side))
        ends = draw(1000, 0.0)[0]
        found = torch.bincount(ends[:, 0] * side + ends[:, 1], minlength=side * side) / 1000
        return float((found - reward(places) / reward(places).sum()).abs().sum())

    def balance_flows(training: Training) -> Iterator[Tensor]:
        (optimizer,) = training.optimizers
        for step in range(200):
            loss = draw(48, 0.1 * (1 - step / 200))[1].square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 40 == 39:
                distances.append(distance())
            yield loss.detach()

    t.loop = balance_flows


COMMANDS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x, lambda x: x + 1, lambda x: x - 3, lambda x: 2 * x, lambda x: -x, lambda x: x.abs(),
    lambda x: x.clamp(min=0), lambda x: x.square().clamp(max=100),
]  # fmt: skip


class ProgramWriter(nn.Module):
    """Writes programs of six commands, one after the other."""

    def __init__(self, commands: int = len(COMMANDS), length: int = 6) -> None:
        super().__init__()
        self.length = length
        self.words, self.cell = nn.Embedding(commands + 1, 16), nn.GRU(16, 32, batch_first=True)
        self.out = nn.Linear(32, commands)

    def forward(self, programs: Tensor) -> Tensor:
        """Logits of each command (n, length, commands)."""
        begun = F.pad(programs[:, :-1] + 1, (1, 0))
        return self.out(self.cell(self.words(begun))[0])

    @torch.no_grad()
    def write(self, n: int) -> Tensor:
        state, last, written = None, torch.zeros(n, 1, dtype=torch.long), []
        for _ in range(self.length):
            found, state = self.cell(self.words(last), state)
            chosen = torch.multinomial(self.out(found[:, 0]).softmax(1), 1)
            written.append(chosen)
            last = chosen + 1
        return torch.cat(written, 1)


def best_programs(t: Training) -> None:
    """Priority queue training (Abolafia et al., 2018): a writer learns the best programs that it has found so far."""
    model = ProgramWriter()
    t.model, t.loaded = model, False
    given = torch.linspace(-4, 4, 9)
    wanted = -((2 * given + 1).abs() - 3)
    queue: dict[tuple[int, ...], float] = {}
    best: list[float] = []

    def merit(program: tuple[int, ...]) -> float:
        value = given
        for command in program:
            value = COMMANDS[command](value)
        return float((-(value - wanted).abs() / 3).exp().mean())

    def search(training: Training) -> Iterator[Tensor]:
        (optimizer,) = training.optimizers
        for step in range(150):
            for program in {tuple(row) for row in model.write(48).tolist()} - queue.keys():
                queue[program] = merit(program)
            kept = sorted(queue, key=lambda program: queue[program], reverse=True)[:10]
            for program in queue.keys() - kept:
                del queue[program]
            programs = torch.tensor(kept)
            logits = model(programs)
            likely = F.cross_entropy(logits.flatten(0, 1), programs.flatten())
            entropy = -(logits.softmax(2) * logits.log_softmax(2)).sum(2).mean()
            optimizer.zero_grad()
            (likely - 0.2 * entropy).backward()
            optimizer.step()
            if step % 25 == 24:
                best.append(queue[kept[0]])
            yield likely.detach()

    t.loop = search


class FrankWolfe(Optimizer):
    """Goes from the weights toward the point of a ball that lies farthest along the averaged gradient's opposite."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.9, widths: float = 3.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        for p in params:
            self.state[p] = {"average": torch.zeros_like(p), "radius": widths * max(float(p.detach().norm()), 1.0)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                average, radius = self.state[p]["average"], self.state[p]["radius"]
                average.lerp_(p.grad, 1 - group["momentum"])
                toward = -radius * average / average.norm().clamp(min=1e-12) - p
                share = (group["lr"] * average.norm() / toward.norm().clamp(min=1e-12)).clamp(max=1.0)
                p.add_(share * toward)


def frank_wolfe(t: Training) -> None:
    """Stochastic Frank-Wolfe (Pokutta et al., 2020): each weight stays within a ball, without any projection."""
    t.epochs = 6
    t.optimizers_of = lambda training: [FrankWolfe(training.parameters(), lr=0.3)]
    t.scheduler_of = lambda optimizer: LambdaLR(optimizer, lambda step: 1.0 if step < 128 else 0.1)


class Perceptron(nn.Module):
    """One hidden layer on a flat image; ``feed`` brings an error (rows, classes) back onto the pixels."""

    feed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(64, 96, bias=False), nn.Linear(96, 4, bias=False)
        nn.init.kaiming_uniform_(self.hidden.weight)
        self.register_buffer("feed", 0.3 * (2 * torch.rand(4, 64) - 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x).relu())


def error_into_input(t: Training) -> None:
    """PEPITA (Dellaferrera and Kreiman, 2022): a second pass with the error within the input, and no backward pass."""
    model = Perceptron()
    t.model, t.epochs = model, 8
    t.transform = lambda batch: ((batch[0] + 1.3 * torch.randn_like(batch[0])).flatten(1), batch[1])
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.01, momentum=0.9)]
    right: list[float] = []

    @torch.no_grad()
    def two_passes(training: Training, batch: Batch) -> Tensor:
        (optimizer,), (x, y) = training.optimizers, batch
        hidden = model.hidden(x).relu()
        z = model.out(hidden)
        error = z.softmax(1) - F.one_hot(y, 4)
        disturbed = x - error @ model.feed
        again = model.hidden(disturbed).relu()
        model.hidden.weight.grad = (hidden - again).T @ disturbed / len(x)
        model.out.weight.grad = error.T @ again / len(x)
        optimizer.step()
        return F.cross_entropy(z, y)

    @torch.no_grad()
    def examine(training: Training, epoch: int) -> None:
        x, y = training.data.tensors
        training.model.eval()
        right.append(float((training.model(x.flatten(1)).argmax(1) == y).float().mean()))
        training.model.train()

    t.update = two_passes
    t.each_epoch.append(examine)


@torch.no_grad()
def _whitened(features: Tensor) -> Tensor:
    """Centred, without correlations, each row of length one."""
    centred = features - features.mean(0)
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(centred))
    return F.normalize(centred @ vectors / (values + 1e-4).sqrt(), dim=1)


@torch.no_grad()
def _k_means(x: Tensor, k: int, rounds: int = 15) -> Tensor:
    """The cluster of each row. An empty cluster begins again beside a row drawn by lot."""
    centres = x[torch.randperm(len(x))[:k]].clone()
    for _ in range(rounds):
        mine = torch.cdist(x, centres).argmin(1)
        sizes = torch.bincount(mine, minlength=k)
        sums = torch.zeros_like(centres).index_add_(0, mine, x)
        lost = x[torch.randint(len(x), (k,))] + 1e-3 * torch.randn_like(centres)
        centres = torch.where(sizes[:, None] > 0, sums / sizes.clamp(min=1)[:, None], lost)
    return torch.cdist(x, centres).argmin(1)


def deep_cluster(t: Training) -> None:
    """DeepCluster (Caron et al., 2018): every epoch clusters the features anew, and a new head learns the clusters."""
    k, t.epochs = 6, 8
    t.model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(96, 24), nn.ReLU(),
    )  # fmt: skip
    head = nn.Linear(24, k)
    t.extra.append(head)
    t.optimizers_of = lambda training: [
        Adam(training.model.parameters(), lr=3e-3, weight_decay=1e-5),
        SGD(head.parameters(), lr=0.3),
    ]
    agreements: list[float] = []

    def moved(x: Tensor) -> Tensor:
        return x.roll(torch.randint(-1, 2, (2,)).tolist(), (2, 3)) + 0.1 * torch.randn_like(x)

    @torch.no_grad()
    def purity(clusters: Tensor, y: Tensor) -> float:
        counts = torch.zeros(k, 4).index_put_((clusters, y), torch.ones(len(y)), accumulate=True)
        return float(counts.max(1).values.sum() / len(y))

    def learn(training: Training) -> Iterator[Tensor]:
        model, (x, y) = training.model, training.data.tensors
        for _ in range(training.epochs):
            model.eval()
            with torch.no_grad():
                clusters = _k_means(_whitened(model(x)), k)
            agreements.append(purity(clusters, y))
            model.train()
            nn.init.normal_(head.weight, 0, 0.01)
            nn.init.zeros_(head.bias)
            sizes = torch.bincount(clusters, minlength=k).float()
            drawn = torch.multinomial(1 / sizes[clusters], len(x), replacement=True)
            for rows in torch.split(drawn, 32):
                loss = F.cross_entropy(head(model(moved(x[rows]))), clusters[rows])
                for each in training.optimizers:
                    each.zero_grad()
                loss.backward()
                for each in training.optimizers:
                    each.step()
                yield loss.detach()

    t.loop, t.loaded = learn, False


def projected_debiasing(t: Training) -> None:
    """Adversarial debiasing (Zhang et al., 2018): the predictor's gradient loses what would help the adversary."""
    x, y = t.data.tensors
    group = torch.rand(len(y)) < torch.where(y > 4, 0.7, 0.3)
    t.data = TensorDataset(torch.cat([x[:, :-1], 2.0 * group.unsqueeze(1) - 1], 1), (y > 4).float())
    t.model[-1] = nn.Linear(64, 1)
    adversary = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
    t.extra.append(adversary)
    t.batch_size, t.epochs = 64, 12
    t.optimizers_of = lambda training: [
        Adam(training.model.parameters(), lr=2e-3),
        Adam(adversary.parameters(), lr=1e-2),
    ]
    gaps: list[float] = []

    def update(training: Training, batch: Batch) -> Tensor:
        (x, y), (for_task, for_adversary) = batch, training.optimizers
        weights = list(training.model.parameters())
        z = training.model(x).squeeze(1)
        error = F.binary_cross_entropy_with_logits(z, y)
        guess = adversary(torch.stack([z, z * y, y], 1)).squeeze(1)
        fooled = F.binary_cross_entropy_with_logits(guess, (x[:, -1] > 0).float())
        helpful = torch.autograd.grad(fooled, weights, retain_graph=True)
        for_adversary.zero_grad()
        fooled.backward(inputs=list(adversary.parameters()), retain_graph=True)
        for p, grad, other in zip(weights, torch.autograd.grad(error, weights), helpful):
            unit = other / (other.norm() + 1e-8)
            p.grad = grad - (grad * unit).sum() * unit - other
        for_adversary.step()
        for_task.step()
        return error.detach()

    @torch.no_grad()
    def compare(training: Training, epoch: int) -> None:
        """How much more often one group is chosen, among those that should be."""
        x, y = training.data.tensors
        chosen, first, deserving = training.model(x).squeeze(1) > 0, x[:, -1] > 0, y > 0
        gaps.append(float(chosen[first & deserving].float().mean() - chosen[~first & deserving].float().mean()))

    t.update = update
    t.each_epoch.append(compare)


class MaskedLinear(nn.Linear):
    """Only some inputs reach an output."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask.float())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


class Autoregressive(nn.Module):
    """One step of a flow: shift and scale of each column depend on the columns before it."""

    def __init__(self, size: int, hidden: int = 48) -> None:
        super().__init__()
        columns, units = torch.arange(size), torch.arange(hidden) % (size - 1)
        twice = columns.repeat(2)
        self.body = nn.Sequential(
            MaskedLinear(units[:, None] >= columns), nn.Tanh(), MaskedLinear(units[:, None] >= units), nn.Tanh()
        )
        self.out = MaskedLinear(twice[:, None] > units)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shift, scale = self.out(self.body(x)).chunk(2, dim=1)
        scale = 2 * (scale / 2).tanh()
        return ((x - shift) * (-scale).exp()).flip(1), -scale.sum(1)


class Flow(nn.Module):
    """The logarithm of the density of each row."""

    def __init__(self, size: int, steps: int = 4) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Autoregressive(size) for _ in range(steps))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x))
        for step in self.steps:
            x, volume = step(x)
            total = total + volume
        return total - x.square().sum(1) / 2 - x.shape[1] * math.log(2 * math.pi) / 2


def autoregressive_flow(t: Training) -> None:
    """Masked autoregressive flow (Papamakarios et al., 2017), the best copy kept by rows that are held out."""
    x, _ = t.data.tensors
    kept, t.data = x[-128:], TensorDataset(x[:-128], torch.zeros(len(x) - 128))
    t.model, t.epochs = Flow(x.shape[1]), 12
    once_over = len(t.data) // t.batch_size
    t.transform = lambda batch: (batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1])
    t.loss = lambda model, batch: -model(batch[0]).mean()
    t.optimizers_of = lambda training: [Adam(training.parameters(), lr=3e-3, weight_decay=1e-6)]
    found: list[float] = []
    best: dict[str, Any] = {}

    @torch.no_grad()
    def validate(training: Training) -> None:
        if training.steps % once_over:
            return
        training.model.eval()
        found.append(float(-training.model(kept + 0.1 * torch.randn_like(kept)).mean()))
        training.model.train()
        if found[-1] == min(found):
            best.update(copy.deepcopy(training.model.state_dict()))
        if training.steps == training.epochs * once_over:
            training.model.load_state_dict(best)

    t.each_step.append(validate)


class Dictionary(nn.Module):
    """Atoms of length one (size, atoms)."""

    def __init__(self, size: int, atoms: int) -> None:
        super().__init__()
        self.atoms = nn.Parameter(F.normalize(torch.randn(size, atoms), dim=0))

    def forward(self, codes: Tensor) -> Tensor:
        return codes @ self.atoms.T

    @torch.no_grad()
    def encode(self, x: Tensor, price: float, rounds: int = 40) -> Tensor:
        """Sparse codes by FISTA."""
        step = 1 / float(torch.linalg.matrix_norm(self.atoms, 2)) ** 2
        codes = ahead = torch.zeros(len(x), self.atoms.shape[1])
        pace = 1.0
        for _ in range(rounds):
            new = F.softshrink(ahead - step * (ahead @ self.atoms.T - x) @ self.atoms, price * step)
            faster = (1 + math.sqrt(1 + 4 * pace**2)) / 2
            ahead, codes, pace = new + (pace - 1) / faster * (new - codes), new, faster
        return codes


def sparse_dictionary(t: Training) -> None:
    """Sparse coding (Olshausen and Field, 1996): codes without a gradient, a step of the atoms, unit length again."""
    model, price = Dictionary(8, 16), 0.1
    t.model, t.epochs, t.batch_size = model, 10, 64
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.3)]
    t.scheduler_of = lambda optimizer: LambdaLR(optimizer, lambda step: 0.99**step)
    active: list[float] = []

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,), x = training.optimizers, batch[0]
        codes = model.encode(x, price)
        error = (model(codes) - x).square().sum(1).mean() / 2
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        with torch.no_grad():
            model.atoms.copy_(F.normalize(model.atoms, dim=0))
        active.append(float((codes != 0).float().sum(1).mean()))
        return error.detach() + price * codes.abs().sum(1).mean()

    @torch.no_grad()
    def replace_idle(training: Training, epoch: int) -> None:
        """An atom that no row uses becomes the row that is explained worst."""
        x = training.data.tensors[0]
        codes = model.encode(x, price)
        idle = (codes != 0).sum(0) == 0
        worst = (model(codes) - x).square().sum(1).topk(int(idle.sum())).indices
        model.atoms[:, idle] = F.normalize(x[worst], dim=1).T

    t.update = update
    t.each_epoch.append(replace_idle)


def adapted_context(t: Training) -> None:
    """CAVIA (Zintgraf et al., 2019): each task adapts a few inputs of the network; the weights learn through that."""
    size, tasks = 4, 16
    t.model = nn.Sequential(nn.Linear(1 + size, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))
    t.loaded = False
    held_out: list[float] = []

    def waves() -> tuple[Tensor, Tensor]:
        """Points to adapt to, then points to judge by (tasks, 20, 1)."""
        x = 10 * torch.rand(tasks, 20, 1) - 5
        amplitude, phase = 0.5 + 2 * torch.rand(tasks, 1, 1), math.pi * torch.rand(tasks, 1, 1)
        return x, amplitude * (x + phase).sin()

    def errors(model: nn.Module, context: Tensor, x: Tensor, y: Tensor) -> Tensor:
        beside = context[:, None].expand(-1, x.shape[1], -1)
        return (model(torch.cat([x, beside], 2)) - y).square().mean((1, 2))

    def adapted(model: nn.Module, x: Tensor, y: Tensor, *, learns: bool) -> Tensor:
        context = torch.zeros(tasks, size, requires_grad=True)
        for _ in range(2):
            total = errors(model, context, x, y).sum()
            (slope,) = torch.autograd.grad(total, context, create_graph=learns)
            context = context - 0.5 * slope
        return context

    def outer(training: Training) -> Iterator[Tensor]:
        (optimizer,), model = training.optimizers, training.model
        for step in range(400):
            x, y = waves()
            context = adapted(model, x[:, :10], y[:, :10], learns=True)
            loss = errors(model, context, x[:, 10:], y[:, 10:]).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            if step % 100 == 99:
                x, y = waves()
                context = adapted(model, x[:, :10], y[:, :10], learns=False)
                held_out.append(float(errors(model, context, x[:, 10:], y[:, 10:]).mean().detach()))
            yield loss.detach()

    t.loop = outer


class Foretelling(nn.Module):
    """Frames of a series become vectors; what was seen so far foretells the next ones."""

    def __init__(self, frame: int = 2, size: int = 24, ahead: int = 3) -> None:
        super().__init__()
        self.frame = frame
        self.encoder = nn.Sequential(nn.Linear(frame, 32), nn.ReLU(), nn.Linear(32, size))
        self.memory = nn.GRU(size, size, batch_first=True)
        self.ahead = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(ahead))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        frames = self.encoder(x.reshape(len(x), -1, self.frame))
        return frames, self.memory(frames)[0]


def contrastive_predictive(t: Training) -> None:
    """Contrastive predictive coding (van den Oord et al., 2018), with a linear probe of the summaries now and then."""
    model = Foretelling()
    t.model, t.epochs, t.lr = model, 12, 3e-3
    probes: list[float] = []

    def foretell(_: nn.Module, batch: Batch) -> Tensor:
        frames, seen = model(batch[0])
        which, losses = torch.arange(len(frames)), []
        begin = frames.shape[1] - len(model.ahead) - 1
        for far, guess in enumerate(model.ahead, 1):
            scores = guess(seen[:, begin]) @ frames[:, begin + far].T / math.sqrt(frames.shape[2])
            losses.append(F.cross_entropy(scores, which))
        return torch.stack(losses).mean()

    @torch.no_grad()
    def probe(training: Training, epoch: int) -> None:
        if epoch % 4 == 0:
            x, y = training.data.tensors
            training.model.eval()
            summary = F.pad(model(x)[1][:, -1], (0, 1), value=1.0)
            training.model.train()
            head = torch.linalg.lstsq(summary[:512], F.one_hot(y[:512], 4).float()).solution
            probes.append(float(((summary[512:] @ head).argmax(1) == y[512:]).float().mean()))

    t.loss = foretell
    t.each_epoch.append(probe)


LEARNERS: dict[Callable[[Training], None], str] = {
    variational_monte_carlo: "regress",
    kepler_orbits: "series",
    trajectory_balance: "table",
    best_programs: "text",
    frank_wolfe: "table",
    error_into_input: "image",
    deep_cluster: "image",
    projected_debiasing: "table",
    autoregressive_flow: "rebuild",
    sparse_dictionary: "rebuild",
    adapted_context: "regress",
    contrastive_predictive: "series",
}
"""The techniques, and the task that each changes."""
