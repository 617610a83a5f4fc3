"""A fourth dozen of unusual programs by an independent author: for the end of a piece of work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import cycle, pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from zoo.programs.training import Batch, Training


def admm_pruned(t: Training) -> None:
    """Pruning by ADMM (Zhang et al., 2018): weights are drawn to sparse copies, then cut, and what is left is tuned."""
    t.epochs, cut_at, share, rho = 16, 9, 0.6, 2e-2
    weights: list[Tensor] = [t.model[0].weight, t.model[2].weight]
    copies = [w.detach().clone() for w in weights]
    duals = [torch.zeros_like(w) for w in weights]
    masks: list[Tensor] = []
    distances: list[float] = []

    def large(w: Tensor) -> Tensor:
        return w.abs() > w.abs().flatten().kthvalue(int(share * w.numel())).values

    @torch.no_grad()
    def begin(training: Training, epoch: int) -> None:
        if epoch == cut_at:
            masks.extend(large(w) for w in weights)
            for w, mask in zip(weights, masks):
                w.mul_(mask)
        elif epoch < cut_at:
            for w, copy, dual in zip(weights, copies, duals):
                copy.copy_((w + dual) * large(w + dual))
                dual.add_(w - copy)
            distances.append(sum(float((w - copy).norm()) for w, copy in zip(weights, copies)))

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,) = training.optimizers
        error = training.loss(training.model, batch)
        pull = sum(((w - copy + dual).square().sum() for w, copy, dual in zip(weights, copies, duals)), torch.zeros(()))
        optimizer.zero_grad()
        (error if masks else error + rho / 2 * pull).backward()
        optimizer.step()
        with torch.no_grad():
            for w, mask in zip(weights, masks):
                w.mul_(mask)
        return error.detach()

    t.each_epoch.append(begin)
    t.update = update


class MixedEdge(nn.Module):
    """All operations at once, each with its share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.operations = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width, affine=False)),
                nn.Sequential(
                    nn.Conv2d(width, width, 3, padding=2, dilation=2, groups=width, bias=False),
                    nn.Conv2d(width, width, 1, bias=False),
                    nn.BatchNorm2d(width, affine=False),
                ),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.BatchNorm2d(width, affine=False)),
                nn.Identity(),
            ]
        )

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        x_active = x.relu()
        return sum((share * each(x_active) for share, each in zip(shares, self.operations)), torch.zeros(()))


class SearchedNetwork(nn.Module):
    """A cell of three edges; ``alphas`` say how much each operation counts, the last one is for "nothing"."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        self.edges = nn.ModuleList(MixedEdge(width) for _ in range(3))
        self.head = nn.Linear(2 * width, 4)
        self.alphas = nn.Parameter(1e-3 * torch.randn(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.alphas.softmax(1)
        stem = self.stem(x)
        first = self.edges[0](stem, shares[0])
        second = self.edges[1](stem, shares[1]) + self.edges[2](first, shares[2])
        return self.head(torch.cat([first, second], 1).mean((2, 3)))


def architecture_search(t: Training) -> None:
    """DARTS, first order (Liu et al., 2019): shares learn from held-out rows, weights from the others, in turn."""
    t.model, t.epochs = SearchedNetwork(), 14
    x, y = t.data.tensors
    t.data = TensorDataset(x[:384], y[:384])
    held_out = cycle(DataLoader(TensorDataset(x[384:], y[384:]), batch_size=32, shuffle=True, drop_last=True))
    weights = [p for name, p in t.model.named_parameters() if name != "alphas"]
    chosen: list[list[int]] = []
    t.optimizers_of = lambda training: [
        SGD(weights, lr=0.05, momentum=0.9, weight_decay=3e-4),
        Adam([training.model.alphas], lr=3e-3, betas=(0.5, 0.999), weight_decay=1e-3),
    ]
    t.scheduler_of = lambda optimizer: CosineAnnealingLR(optimizer, 14 * 12, eta_min=1e-3)

    def update(training: Training, batch: Batch) -> Tensor:
        for_weights, for_shares = training.optimizers
        for_shares.zero_grad()
        training.loss(training.model, next(held_out)).backward()
        for_shares.step()
        for_weights.zero_grad()
        loss = training.loss(training.model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 5.0)
        for_weights.step()
        return loss.detach()

    t.update = update
    t.each_epoch.append(lambda training, epoch: chosen.append(training.model.alphas[:, :4].argmax(1).tolist()))


class Splats(nn.Module):
    """Gaussians that add up to a picture (size, size)."""

    def __init__(self, count: int = 24, size: int = 24) -> None:
        super().__init__()
        self.centres = nn.Parameter(2 * torch.rand(count, 2) - 1)
        self.factors = nn.Parameter(torch.tensor([4.0, 0.0, 4.0]) + 0.1 * torch.randn(count, 3))
        self.colours = nn.Parameter(0.1 * torch.randn(count))
        line = torch.linspace(-1, 1, size)
        self.register_buffer("grid", torch.stack(torch.meshgrid(line, line, indexing="ij"), -1).view(-1, 2))

    def forward(self) -> Tensor:
        apart = self.grid[:, None] - self.centres  # (pixels, Gaussians, 2)
        along = self.factors[:, 0] * apart[..., 0] + self.factors[:, 1] * apart[..., 1]
        across = self.factors[:, 2] * apart[..., 1]
        return (-(along.square() + across.square()) / 2).exp() @ self.colours


def _select(splats: Splats, optimizer: Adam, rows: Tensor) -> None:
    """Keeps, and doubles, the Gaussians of these rows; what Adam knows of them goes with them."""
    for group in optimizer.param_groups:
        (old,) = group["params"]
        new = nn.Parameter(old.detach()[rows].clone())
        kept = optimizer.state.pop(old)
        for name in ("exp_avg", "exp_avg_sq"):
            kept[name] = kept[name][rows].clone()
        optimizer.state[new] = kept
        group["params"] = [new]
        setattr(splats, group["name"], new)


def gaussian_splats(t: Training) -> None:
    """Gaussian splatting (Kerbl et al., 2023) of one picture: pale ones go, those still pulled about are doubled."""
    splats = Splats()
    y, x = splats.grid.T
    ring = ((x.square() + y.square()).sqrt() - 0.6).abs() < 0.12
    picture = 0.5 * torch.sin(3 * x + t.seed) * torch.cos(2 * y) + ring.float()
    t.model, t.loaded, steps = splats, False, 360
    rates = {"centres": 1e-2, "factors": 5e-2, "colours": 2e-2}
    t.optimizers_of = lambda training: [
        Adam([{"params": [getattr(splats, name)], "lr": rate, "name": name} for name, rate in rates.items()], eps=1e-15)
    ]
    counts: list[tuple[int, float]] = []

    @torch.no_grad()
    def densify(optimizer: Adam, pulls: Tensor) -> None:
        seen = splats.colours.abs() > 0.02
        busy = seen & (pulls > pulls[seen].quantile(0.7))
        rows = torch.cat([seen.nonzero().flatten(), busy.nonzero().flatten()])
        twins = len(rows) - int(busy.sum())
        _select(splats, optimizer, rows)
        splats.centres[twins:] += 0.05 * torch.randn_like(splats.centres[twins:])
        splats.factors[twins:] *= 1.4

    def fit(training: Training) -> Iterator[Tensor]:
        (optimizer,) = training.optimizers
        pulls = torch.zeros(len(splats.centres))
        for step in range(steps):
            seen = splats()
            loss = 0.8 * F.l1_loss(seen, picture) + 0.2 * F.mse_loss(seen, picture)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            pulls += splats.centres.grad.norm(dim=1)
            optimizer.step()
            if step % 50 == 49 and step < 250:
                densify(optimizer, pulls)
                pulls = torch.zeros(len(splats.centres))
                counts.append((len(pulls), -10 * math.log10(float(F.mse_loss(seen.detach(), picture)))))
            yield loss.detach()

    t.loop = fit


class Speaker(nn.Module):
    """Says two symbols about an object."""

    def __init__(self, features: int, symbols: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, 48), nn.ReLU(), nn.Linear(48, 2 * symbols))

    def forward(self, thing: Tensor) -> torch.distributions.Categorical:
        return torch.distributions.Categorical(logits=self.body(thing).view(len(thing), 2, -1))


class Listener(nn.Module):
    """Which of the candidates was meant."""

    def __init__(self, features: int, symbols: int) -> None:
        super().__init__()
        self.words = nn.ModuleList(nn.Embedding(symbols, 32) for _ in range(2))
        self.see = nn.Sequential(nn.Linear(features, 48), nn.ReLU(), nn.Linear(48, 32))

    def forward(self, message: Tensor, candidates: Tensor) -> Tensor:
        heard = self.words[0](message[:, 0]) + self.words[1](message[:, 1])
        return torch.einsum("bd,bcd->bc", heard, self.see(candidates)) / 32**0.5


def referential_game(t: Training) -> None:
    """A language of their own (Lazaridou et al., 2017): the speaker learns by REINFORCE, the listener by its error."""
    every = F.one_hot(torch.cartesian_prod(torch.arange(6), torch.arange(6)), 6).flatten(1).float()
    things = F.one_hot(torch.randint(6, (1024, 2)), 6).flatten(1).float()
    t.data, t.batch_size, t.epochs = TensorDataset(things, torch.zeros(1024)), 64, 36
    speaker, listener = Speaker(12, 8), Listener(12, 8)
    t.model, baseline, won = nn.ModuleDict({"speaker": speaker, "listener": listener}), torch.zeros(()), []
    t.lr = 5e-3

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,), meant, n = training.optimizers, batch[0], len(batch[0])
        places = torch.randint(4, (n,))
        candidates = things[torch.randint(len(things), (n, 4))]
        candidates[torch.arange(n), places] = meant
        said = speaker(meant)
        message = said.sample()
        errors = F.cross_entropy(listener(message, candidates), places, reduction="none")
        reward = -errors.detach()
        if training.steps == 0:
            baseline.copy_(reward.mean())
        entropy_weight = 0.05 * max(0.0, 1 - training.steps / 400)
        surprise = -said.log_prob(message).sum(1)
        loss = errors.mean() + ((reward - baseline) * surprise).mean() - entropy_weight * said.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        baseline.lerp_(reward.mean(), 0.05)
        return errors.mean().detach()

    @torch.no_grad()
    def play(training: Training, epoch: int) -> None:
        if epoch % 6 == 0:
            message = speaker(every).logits.argmax(-1)
            scores = listener(message, every.expand(len(every), -1, -1))
            won.append(float((scores.argmax(1) == torch.arange(len(every))).float().mean()))

    t.update = update
    t.each_epoch.append(play)


class StateSpace(nn.Module):
    """Hidden states of a series: how they move, what is proposed after a look at the next value, and what one sees."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.size = size
        self.move = nn.Sequential(nn.Linear(size, 24), nn.Tanh(), nn.Linear(24, 2 * size))
        self.propose = nn.Sequential(nn.Linear(size + 1, 24), nn.Tanh(), nn.Linear(24, 2 * size))
        self.see = nn.Sequential(nn.Linear(size, 24), nn.Tanh(), nn.Linear(24, 1))
        self.log_noise = nn.Parameter(torch.tensor(-1.0))

    def forward(self, x: Tensor, particles: int) -> Tensor:
        """The particle filter's estimate of log p(x) for each row of x (B, T)."""
        rows, steps = x.shape
        z, evidence = x.new_zeros(rows, particles, self.size), x.new_zeros(rows)
        log_weights = x.new_full((rows, particles), -math.log(particles))
        for step in range(steps):
            now = x[:, step, None, None].expand(-1, particles, 1)
            prior, guess = self._normal(self.move, z), self._normal(self.propose, torch.cat([z, now], 2))
            z = guess.rsample()
            seen = torch.distributions.Normal(self.see(z), self.log_noise.exp()).log_prob(now).squeeze(2)
            log_weights = log_weights + seen + (prior.log_prob(z) - guess.log_prob(z)).sum(2)
            total = log_weights.logsumexp(1)
            evidence, log_weights = evidence + total, log_weights - total[:, None]
            z, log_weights = self._resampled(z, log_weights)
        return evidence

    def _normal(self, net: nn.Module, x: Tensor) -> torch.distributions.Normal:
        change, scale = net(x).chunk(2, 2)
        return torch.distributions.Normal(x[..., : self.size] + change, F.softplus(scale) + 0.01)

    def _resampled(self, z: Tensor, log_weights: Tensor) -> Batch:
        """Where few particles carry the weight, particles are drawn anew; no gradient goes through the draw."""
        n = log_weights.shape[1]
        weights = log_weights.detach().exp()
        poor = (1 / weights.square().sum(1) < n / 2)[:, None]
        drawn = torch.where(poor, torch.multinomial(weights, n, replacement=True), torch.arange(n))
        z = z.gather(1, drawn[..., None].expand_as(z))
        return z, torch.where(poor, torch.full_like(log_weights, -math.log(n)), log_weights)


def filtered_particles(t: Training) -> None:
    """Filtering objectives (Maddison et al., 2017): the likelihood that a resampling particle filter finds."""
    x = t.data.tensors[0][:, :12, 0]
    t.data = TensorDataset(x[:512], torch.zeros(512))
    t.model, t.batch_size, t.epochs, t.lr = StateSpace(), 64, 20, 1e-2
    t.loss = lambda model, batch: -model(batch[0], 6).mean() / batch[0].shape[1]
    held_out: list[float] = []

    @torch.no_grad()
    def judge(training: Training, epoch: int) -> None:
        if epoch % 4 == 0:
            held_out.append(float(training.model(x[512:], 24).mean()))

    t.each_epoch.append(judge)


class BackwardEquation(nn.Module):
    """The value at the start, its slope, and one net for the slope at each later time."""

    def __init__(self, size: int, times: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.rand(1))
        self.slope = nn.Parameter(0.2 * torch.rand(1, size) - 0.1)
        self.slopes = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm1d(size),
                nn.Linear(size, 20, bias=False),
                nn.BatchNorm1d(20),
                nn.ReLU(),
                nn.Linear(20, size),
            )
            for _ in range(times - 1)
        )

    def forward(self, noise: Tensor, dt: float) -> Batch:
        """From noise (times, rows, size): where the paths end, and the values there that the equation leads to."""
        rows = noise.shape[1]
        x, value, slope = torch.zeros_like(noise[0]), self.value.expand(rows), self.slope.expand(rows, -1)
        for step, moved in enumerate(noise):
            value = value + dt * slope.square().sum(1) / 2 + (slope * moved).sum(1)
            x = x + 2**0.5 * moved
            if step + 1 < len(noise):
                slope = self.slopes[step](x) / x.shape[1]
        return x, value


def backward_stochastic(t: Training) -> None:
    """Deep BSDE (Han et al., 2018): a Hamilton-Jacobi-Bellman equation in ten dimensions, solved along random paths."""
    size, times, rows = 10, 8, 64
    t.model, t.loaded = BackwardEquation(size, times), False
    t.optimizers_of = lambda training: [Adam(training.parameters(), lr=2e-2)]
    t.scheduler_of = lambda optimizer: CosineAnnealingLR(optimizer, 200)
    values: list[float] = []

    def solve(training: Training) -> Iterator[Tensor]:
        (optimizer,), model, dt = training.optimizers, training.model, 1 / times
        for step in range(200):
            x, value = model(dt**0.5 * torch.randn(times, rows, size), dt)
            loss = (value - ((1 + x.square().sum(1)) / 2).log()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            training.scheduler.step()
            if step % 20 == 0:
                values.append(model.value.item())
            yield loss.detach()

    t.loop = solve


class Helmholtz(nn.Module):
    """Two layers of binary causes, with nets upwards and downwards."""

    def __init__(self, sizes: tuple[int, ...] = (64, 24, 8)) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.down = nn.ModuleList(nn.Linear(b, a) for a, b in pairwise(sizes))
        self.top = nn.Parameter(torch.zeros(sizes[-1]))

    def guess(self, x: Tensor) -> list[Tensor]:
        states = [x]
        for layer in self.up:
            states.append(layer(states[-1]).sigmoid().bernoulli())
        return states

    def dream(self, rows: int) -> list[Tensor]:
        states = [self.top.sigmoid().expand(rows, -1).bernoulli()]
        for layer in reversed(self.down):
            states.insert(0, layer(states[0]).sigmoid().bernoulli())
        return states


def wake_and_sleep(t: Training) -> None:
    """Wake-sleep (Hinton et al., 1995): awake, the nets downwards learn what was seen; asleep, those upwards dreams."""
    x, y = t.data.tensors
    t.data = TensorDataset((x.flatten(1) > 0).float(), y)
    machine = Helmholtz()
    t.model, t.epochs = machine, 30
    t.optimizers_of = lambda training: [
        Adam([*machine.down.parameters(), machine.top], lr=5e-3),
        Adam(machine.up.parameters(), lr=5e-3),
    ]

    def surprise(logits: Tensor, states: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, states, reduction="none").sum(1).mean()

    def update(training: Training, batch: Batch) -> Tensor:
        awake, asleep = training.optimizers
        with torch.no_grad():
            seen = machine.guess(batch[0])
        loss = surprise(machine.top.expand_as(seen[-1]), seen[-1])
        for layer, below, above in zip(machine.down, seen, seen[1:]):
            loss = loss + surprise(layer(above), below)
        awake.zero_grad()
        loss.backward()
        awake.step()
        with torch.no_grad():
            dreamt = machine.dream(len(batch[0]))
        missed = torch.zeros(())
        for layer, below, above in zip(machine.up, dreamt, dreamt[1:]):
            missed = missed + surprise(layer(below), above)
        asleep.zero_grad()
        missed.backward()
        asleep.step()
        return loss.detach()

    t.update = update


class Recursive(nn.Module):
    """One small net that improves a thought and an answer in turn."""

    def __init__(self, features: int, size: int = 32) -> None:
        super().__init__()
        self.size, self.ask = size, nn.Linear(features, size)
        self.net = nn.Sequential(nn.Linear(size, 64), nn.SiLU(), nn.Linear(64, size))
        self.norm, self.out = nn.RMSNorm(size), nn.Linear(size, 1)

    def begin(self, rows: int) -> Batch:
        return torch.zeros(rows, self.size), torch.zeros(rows, self.size)

    def round(self, asked: Tensor, answer: Tensor, thought: Tensor) -> Batch:
        for _ in range(3):
            thought = self.norm(thought + self.net(asked + answer + thought))
        return self.norm(answer + self.net(answer + thought)), thought

    def forward(self, x: Tensor, answer: Tensor, thought: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        asked = self.ask(x)
        with torch.no_grad():
            answer, thought = self.round(asked.detach(), answer, thought)
        answer, thought = self.round(asked, answer, thought)
        return self.out(answer), answer.detach(), thought.detach()


def recursive_reasoning(t: Training) -> None:
    """Tiny recursive models (Jolicoeur-Martineau, 2025): three steps a batch, only the last round has a gradient."""
    x, y = t.data.tensors
    t.data = TensorDataset(x[:896], y[:896])
    t.model, t.epochs, steady_share = Recursive(12), 12, 0.98
    steady = deepcopy(t.model).requires_grad_(False)
    held_out: list[float] = []

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,), model = training.optimizers, training.model
        answer, thought = model.begin(len(batch[0]))
        for _ in range(3):
            value, answer, thought = model(batch[0], answer, thought)
            loss = F.mse_loss(value, batch[1])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        with torch.no_grad():
            for mine, p in zip(steady.parameters(), model.parameters()):
                mine.lerp_(p, 1 - steady_share)
        return loss.detach()

    @torch.no_grad()
    def judge(training: Training, epoch: int) -> None:
        answer, thought = steady.begin(128)
        for _ in range(6):
            value, answer, thought = steady(x[896:], answer, thought)
        held_out.append(float(F.mse_loss(value, y[896:])))

    t.update = update
    t.each_epoch.append(judge)


def delay_compensated(t: Training) -> None:
    """Delay compensation (Zheng et al., 2017): gradients of workers' stale weights, corrected for the way since."""
    workers, strength, t.epochs = 4, 0.5, 10
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.1)]

    def copied(training: Training) -> dict[str, Tensor]:
        return {name: p.detach().clone().requires_grad_() for name, p in training.model.named_parameters()}

    stale = [copied(t) for _ in range(workers)]
    accuracies: list[float] = []
    best: dict[str, Tensor] = {}

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,), mine = training.optimizers, stale[training.steps % workers]
        loss = F.cross_entropy(functional_call(training.model, mine, (batch[0],)), batch[1])
        gradients = torch.autograd.grad(loss, list(mine.values()))
        with torch.no_grad():
            for p, old, g in zip(training.model.parameters(), mine.values(), gradients):
                p.grad = g + strength * g.square() * (p - old)
        optimizer.step()
        stale[training.steps % workers] = copied(training)
        return loss.detach()

    @torch.no_grad()
    def judge(training: Training, epoch: int) -> None:
        x, y = training.data.tensors
        accuracies.append(float((training.model(x).argmax(1) == y).float().mean()))
        if accuracies[-1] == max(accuracies):
            best.update(deepcopy(training.model.state_dict()))

    t.update = update
    t.each_epoch.append(judge)


def _worst(model: nn.Sequential, x: Tensor, y: Tensor, radius: float) -> Tensor:
    """The worst logits that any picture within the radius could have, from intervals through all layers."""
    low, high = x - radius, x + radius
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            middle, half = layer((low + high) / 2), (high - low) / 2
            if isinstance(layer, nn.Conv2d):
                half = F.conv2d(half, layer.weight.abs(), None, layer.stride, layer.padding)
            else:
                half = F.linear(half, layer.weight.abs())
            low, high = middle - half, middle + half
        else:
            low, high = layer(low), layer(high)
    return torch.where(F.one_hot(y, low.shape[1]).bool(), low, high)


def interval_bounds(t: Training) -> None:
    """Interval bound propagation (Gowal et al., 2018): the worst case counts more and more, and reaches further."""
    t.model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 4),
    )  # fmt: skip
    t.epochs, warm, ramp, reach = 10, 20, 120, 0.25
    certified: list[float] = []

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,), (x, y) = training.optimizers, batch
        along = min(1.0, max(0.0, (training.steps - warm) / ramp))
        plain = F.cross_entropy(training.model(x), y)
        worst = F.cross_entropy(_worst(training.model, x, y, along * reach), y)
        loss = (1 - 0.5 * along) * plain + 0.5 * along * worst
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def certify(training: Training, epoch: int) -> None:
        x, y = training.data.tensors
        certified.append(float((_worst(training.model, x[:128], y[:128], reach).argmax(1) == y[:128]).float().mean()))

    t.update = update
    t.each_epoch.append(certify)


def eigengame(t: Training) -> None:
    """EigenGame (Gemp et al., 2021): each direction seeks variance, and is fined for what those before it found."""
    t.model, t.batch_size, t.epochs = nn.Linear(8, 3, bias=False), 64, 12
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.05, maximize=True)]
    angles: list[Tensor] = []
    with torch.no_grad():
        t.model.weight.copy_(F.normalize(t.model.weight, dim=1))
    exact = torch.linalg.svd(t.data.tensors[0], full_matrices=False).Vh[:3]

    @torch.no_grad()
    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,), x, rows = training.optimizers, batch[0], training.model.weight
        z = training.model(x)
        pulled = z.T @ x / len(x)  # (3, 8): the covariance times each direction
        shared = pulled @ rows.T  # (3, 3)
        fines = (shared / shared.diagonal()).tril(-1)  # only of those before
        slopes = 2 * (pulled - fines @ pulled)
        rows.grad = slopes - (slopes * rows).sum(1, keepdim=True) * rows
        optimizer.step()
        rows.copy_(F.normalize(rows, dim=1))
        return F.mse_loss(z @ rows, x)

    t.update = update
    t.each_epoch.append(lambda training, epoch: angles.append((training.model.weight.detach() * exact).sum(1).abs()))


class Topics(nn.Module):
    """A document's words (rows, words) as a mixture of topics; the mixture is a softmax of a normal."""

    def __init__(self, words: int, topics: int, prior: float) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(words, 64), nn.Softplus(), nn.Linear(64, 64), nn.Softplus(), nn.Dropout(0.1)
        )
        self.mean, self.spread = nn.Linear(64, topics), nn.Linear(64, topics)
        self.norms = nn.ModuleList(nn.BatchNorm1d(n, affine=n == words) for n in (topics, topics, words))
        self.topics, self.drop = nn.Linear(topics, words, bias=False), nn.Dropout(0.1)
        self.log_variance = math.log((1 - 1 / topics) / prior)  # of the normal next to the Dirichlet prior

    def forward(self, counts: Tensor) -> Batch:
        """The loss of each row: that of its words, and that of its topics."""
        hidden = self.body(counts)
        mean, spread = self.norms[0](self.mean(hidden)), self.norms[1](self.spread(hidden))
        shares = (mean + (spread / 2).exp() * torch.randn_like(mean)).softmax(1)
        words = self.norms[2](self.topics(self.drop(shares))).log_softmax(1)
        ratio = spread - self.log_variance
        apart = (ratio.exp() + mean.square() / math.exp(self.log_variance) - 1 - ratio).sum(1) / 2
        return -(counts * words).sum(1), apart


def topics_of_documents(t: Training) -> None:
    """ProdLDA (Srivastava & Sutton, 2017): a topic model by amortised inference, with norms against dead topics."""
    counts = F.one_hot(t.data.tensors[0], 33).sum(1)[:, 1:].float()  # word 0 is for padding
    t.data, t.model, t.epochs = TensorDataset(counts, torch.zeros(len(counts))), Topics(32, 10, 0.5), 15
    t.optimizers_of = lambda training: [Adam(training.parameters(), lr=1e-2, betas=(0.95, 0.999))]
    best_words: list[Tensor] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        words, apart = model(batch[0])
        return (words + apart).mean()

    t.loss = loss
    t.each_epoch.append(lambda training, epoch: best_words.append(training.model.topics.weight.topk(5, dim=0).indices))


KEPT_OUT: dict[Callable[[Training], None], str] = {
    admm_pruned: "table",
    architecture_search: "image",
    gaussian_splats: "image",
    referential_game: "table",
    filtered_particles: "series",
    backward_stochastic: "regress",
    wake_and_sleep: "image",
    recursive_reasoning: "regress",
    delay_compensated: "table",
    interval_bounds: "image",
    eigengame: "rebuild",
    topics_of_documents: "text",
}
