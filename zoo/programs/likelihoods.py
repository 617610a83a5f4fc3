"""Legal techniques with likelihoods of their own: hazards, ranks, counts, mixtures, ensembles, Gaussian processes."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn, optim
from torch.distributions import Categorical, MixtureSameFamily, Normal
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

from zoo.programs.training import Batch, Training


def nll_logistic_hazard(phi, idx, events):
    """phi (n, bins). A row with an event is at risk up to bin ``idx`` and falls there; a censored one survives."""
    bins = torch.arange(phi.shape[1])
    falls = (bins == idx[:, None]) & events[:, None]
    at_risk = (bins < idx[:, None]) | falls
    bce = F.binary_cross_entropy_with_logits(phi, falls.float(), reduction="none")
    return (bce * at_risk).sum(1).mean()


def discrete_hazards(t: Training) -> None:
    """Survival with censoring in discrete time (Gensheimer & Narasimhan, 2019; Kvamme & Borgan, 2019)."""
    n, bins = 1536, 10
    x = torch.randn(n, 9)
    rate = (0.8 * x[:, 0] - 0.6 * x[:, 1] * x[:, 2] + 0.5 * x[:, 3].abs()).exp() / 10
    death, leave = torch.empty(n).exponential_() / rate, torch.empty(n).exponential_(1 / 20)
    events, durations = death <= leave, torch.minimum(death, leave)
    grid = durations[:1280][events[:1280]].quantile(torch.linspace(0, 0.95, bins + 1)[1:])
    idx = torch.bucketize(durations, grid)  # those beyond the last cut have survived all bins
    events = events & (idx < bins)

    t.data, t.batch_size = TensorDataset(x[:1280], idx[:1280], events[:1280]), 64
    held_out = x[1280:], idx[1280:], events[1280:]
    t.model = nn.Sequential(
        nn.Linear(9, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Dropout(0.1),
        nn.Linear(32, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, bins),
    )  # fmt: skip
    t.optimizers_of = lambda tr: [optim.Adam(tr.parameters(), lr=4e-3)]

    def fit(tr, max_epochs=12, patience=3):
        (optimizer,) = tr.optimizers
        best, best_weights, waited = math.inf, None, 0
        for _ in range(max_epochs):
            tr.model.train()
            for features, times, happened in tr.batches:
                optimizer.zero_grad(set_to_none=True)
                loss = nll_logistic_hazard(tr.model(features), times, happened)
                loss.backward()
                optimizer.step()
                yield loss.detach()
            tr.model.eval()
            with torch.no_grad():
                val_loss = nll_logistic_hazard(tr.model(held_out[0]), *held_out[1:]).item()
            if val_loss < best:
                best, best_weights, waited = val_loss, copy.deepcopy(tr.model.state_dict()), 0
            else:
                waited += 1
                if waited >= patience:
                    break
        tr.model.load_state_dict(best_weights)

    t.loop = fit


class CoralLayer(nn.Module):
    """One direction for all ranks, a bias for each threshold."""

    def __init__(self, size_in, num_classes):
        super().__init__()
        self.coral_weights = nn.Linear(size_in, 1, bias=False)
        self.coral_bias = nn.Parameter(torch.arange(num_classes - 1, 0, -1).float() / (num_classes - 1))

    def forward(self, x):
        return self.coral_weights(x) + self.coral_bias


def coral_ratings(t: Training) -> None:
    """Rank-consistent ordinal regression (Cao et al., 2020)."""
    num_classes, x = 5, torch.randn(1280, 16)
    taste = (x[:, 0] * x[:, 1] + x[:, 2:6].sum(1) + 2 * x[:, 6].sin()) / 2 + 0.3 * torch.randn(len(x))
    y = torch.bucketize(taste, torch.tensor([-1.6, -0.5, 0.4, 1.3]))
    t.data, t.epochs = TensorDataset(x, y), 5
    t.model = nn.Sequential(
        nn.Linear(16, 64), nn.LeakyReLU(), nn.Linear(64, 32), nn.LeakyReLU(), CoralLayer(32, num_classes)
    )

    def coral_loss(model, batch):
        features, rank = batch
        logits = model(features)
        levels = (rank.unsqueeze(1) > torch.arange(num_classes - 1)).to(logits.dtype)
        term1 = F.logsigmoid(logits) * levels + (F.logsigmoid(logits) - logits) * (1 - levels)
        return -term1.sum(dim=1).mean()

    def train_step(tr, batch):
        (optimizer,) = tr.optimizers
        loss = coral_loss(tr.model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            ranks = (tr.model(batch[0]) > 0).sum(1)
            tr.mae.append(float((ranks - batch[1]).abs().float().mean()))
        return loss.detach()

    t.mae, t.update = [], train_step
    t.optimizers_of = lambda tr: [optim.Adam(tr.parameters(), lr=5e-3)]


class ClaimModel(nn.Module):
    """Zero-inflated negative binomial; the exposure is an offset of the log mean."""

    def __init__(self, features, rate):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU())
        self.log_rate, self.zero_logit = nn.Linear(32, 1), nn.Linear(32, 1)
        self.log_theta = nn.Parameter(torch.zeros(()))
        nn.init.constant_(self.log_rate.bias, math.log(rate))

    def forward(self, x, exposure):
        h = self.body(x)
        return self.log_rate(h).squeeze(1) + exposure.log(), self.zero_logit(h).squeeze(1), self.log_theta


def zinb_nll(log_mu, zero_logit, log_theta, y):
    theta = log_theta.exp()
    log_total = torch.logaddexp(log_mu, log_theta)
    nb = torch.lgamma(y + theta) - torch.lgamma(theta) - torch.lgamma(y + 1)
    nb = nb + theta * (log_theta - log_total) + y * (log_mu - log_total)
    log_pi, log_rest = F.logsigmoid(zero_logit), F.logsigmoid(-zero_logit)
    return -torch.where(y == 0, torch.logaddexp(log_pi, log_rest + nb), log_rest + nb)


def zero_inflated_claims(t: Training) -> None:
    """Motor claims (Lambert, 1992; Greene, 1994): structural zeros, over-dispersion, years of exposure."""
    n, n_train = 5120, 4096
    age, power, bonus = 18 + 62 * torch.rand(n), 4 + 11 * torch.rand(n), 50 + 100 * torch.rand(n)
    area, exposure = torch.randint(6, (n,)), 0.2 + 1.8 * torch.rand(n)
    log_rate = 0.3 + 0.9 * (age < 26) + 0.12 * (power - 9) + 0.012 * (bonus - 100) + torch.linspace(-0.6, 0.6, 6)[area]
    mu = exposure * log_rate.exp()
    counts = torch.poisson(mu * torch.distributions.Gamma(2.0, 2.0).sample((n,)))
    unreported = torch.rand(n) < torch.sigmoid(0.06 * (100 - bonus) - 0.5)
    claims = torch.where(unreported, 0.0, counts)

    numeric = torch.stack([age, power, bonus], 1)
    numeric = (numeric - numeric[:n_train].mean(0)) / numeric[:n_train].std(0)
    x = torch.cat([numeric, F.one_hot(area, 6).float()], 1)
    rate = (claims[:n_train].sum() / exposure[:n_train].sum()).item()
    t.model = ClaimModel(9, rate)
    t.data, t.batch_size, t.epochs = TensorDataset(*(each[:n_train] for each in (x, exposure, claims))), 128, 6
    t.loss = lambda model, batch: zinb_nll(*model(batch[0], batch[1]), batch[2]).mean()
    t.val_nll, t.val_deviance = [], []

    def groups(tr):
        decayed = [p for p in tr.parameters() if p is not t.model.log_theta]
        return [optim.AdamW([{"params": decayed}, {"params": [t.model.log_theta], "weight_decay": 0.0}], lr=5e-3)]

    @torch.no_grad()
    def validate(tr, epoch):
        tr.model.eval()
        y = claims[n_train:]
        log_mu, zero_logit, log_theta = tr.model(x[n_train:], exposure[n_train:])
        expected = torch.sigmoid(-zero_logit) * log_mu.exp()
        tr.val_nll.append(zinb_nll(log_mu, zero_logit, log_theta, y).mean().item())
        tr.val_deviance.append(2 * (torch.xlogy(y, y / expected) - (y - expected)).mean().item())
        tr.model.train()

    t.optimizers_of = groups
    t.scheduler_of = lambda opt: CosineAnnealingLR(opt, T_max=6 * 32, eta_min=1e-4)
    t.each_epoch.append(validate)


class MDN(nn.Module):
    def __init__(self, hidden=48, k=5):
        super().__init__()
        self.z_h = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.z_pi, self.z_mu, self.z_sigma = nn.Linear(hidden, k), nn.Linear(hidden, k), nn.Linear(hidden, k)
        with torch.no_grad():
            self.z_mu.bias.copy_(torch.linspace(-1.5, 1.5, k))

    def forward(self, x):
        h = self.z_h(x)
        sigma = F.softplus(self.z_sigma(h)) + 1e-2
        return MixtureSameFamily(Categorical(logits=self.z_pi(h)), Normal(self.z_mu(h), sigma))


def mixture_density(t: Training) -> None:
    """Mixture density network (Bishop, 1994) on his inverse problem, where an x has up to three y."""
    y = torch.rand(1536, 1)
    x = y + 0.3 * torch.sin(2 * math.pi * y) + 0.05 * torch.randn_like(y)
    x, y = (x - x.mean()) / x.std(), (y - y.mean()) / y.std()
    t.data, t.batch_size, t.epochs, t.lr = TensorDataset(x, y), 128, 18, 1e-2
    t.model = MDN()
    t.loss = lambda model, batch: -model(batch[0]).log_prob(batch[1].squeeze(1)).mean()


class Ensemble(nn.Module):
    """Members of one shape whose weights lie on top of each other."""

    def __init__(self, members: list[nn.Module]) -> None:
        super().__init__()
        stacked, _ = stack_module_state(members)
        self.names = list(stacked)
        self.weights = nn.ParameterList([nn.Parameter(w.detach().clone()) for w in stacked.values()])
        self.skeleton = (copy.deepcopy(members[0]).to("meta"),)  # in a tuple: not a submodule

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def one(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(self.skeleton[0], weights, (x,))

        mean, raw = vmap(one, in_dims=(0, None))(dict(zip(self.names, self.weights)), x).unbind(-1)
        return mean, F.softplus(raw) + 1e-4


def calibrated_ensemble(t: Training) -> None:
    """Deep ensembles (Lakshminarayanan et al., 2017) for a noise that varies; then split conformal intervals."""

    def draw(n: int) -> tuple[Tensor, Tensor]:
        x = 4 * torch.rand(n, 1) - 2
        return x, (torch.sin(3 * x) + (0.05 + 0.2 * (x + 2) / 2) * torch.randn(n, 1)).squeeze(1)

    def member() -> nn.Module:
        return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))

    t.data = TensorDataset(*draw(800))
    t.model = Ensemble([member() for _ in range(5)])
    t.epochs, t.lr, held_out, fresh, coverage = 8, 1e-2, draw(200), draw(500), {}

    @torch.no_grad()
    def mixture(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, var = model(x)
        centre = mean.mean(0)
        return centre, ((var + mean.square()).mean(0) - centre.square()).sqrt()

    def conformal(model: nn.Module, miss: float = 0.1) -> None:
        centre, spread = mixture(model, held_out[0])
        scores = ((held_out[1] - centre).abs() / spread).sort().values
        bound = scores[math.ceil((len(scores) + 1) * (1 - miss)) - 1]
        centre, spread = mixture(model, fresh[0])
        coverage[miss] = ((fresh[1] - centre).abs() <= bound * spread).float().mean().item()

    def loop(training: Training) -> Iterator[Tensor]:
        (optimizer,) = training.optimizers
        for _ in range(training.epochs):
            for x, y in training.batches:
                mean, var = training.model(x)
                each = F.gaussian_nll_loss(mean, y.expand_as(mean), var, reduction="none").mean(1)
                optimizer.zero_grad()
                each.sum().backward()  # no member sees another's gradient
                optimizer.step()
                yield each.detach().mean()
        conformal(training.model)

    t.loop = loop


class SVGP(nn.Module):
    """Sparse variational GP with whitened inducing variables; ``forward`` gives mean and variance of f."""

    def __init__(self, z: Tensor) -> None:
        super().__init__()
        m, d = z.shape
        self.z = nn.Parameter(z.clone())
        self.log_lengths, self.log_scale = nn.Parameter(z.new_zeros(d)), nn.Parameter(z.new_zeros(()))
        self.log_noise = nn.Parameter(z.new_full((), -1.0))
        self.mean, self.raw = nn.Parameter(z.new_zeros(m)), nn.Parameter(z.new_zeros(m, m))

    def kernel(self, a: Tensor, b: Tensor) -> Tensor:
        gap = (a[:, None] - b[None]) / self.log_lengths.exp()
        return self.log_scale.exp() * torch.exp(-0.5 * gap.square().sum(-1))

    @property
    def root(self) -> Tensor:
        return self.raw.tril(-1) + torch.diag(self.raw.diagonal().exp())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k = self.kernel(self.z, self.z)
        chol = torch.linalg.cholesky(k + 1e-6 * torch.eye(len(k), dtype=k.dtype))
        a = torch.linalg.solve_triangular(chol, self.kernel(self.z, x), upper=False)
        var = self.log_scale.exp() - a.square().sum(0) + (self.root.T @ a).square().sum(0)
        return self.mean @ a, var

    def kl(self) -> Tensor:
        root = self.root
        return 0.5 * (root.square().sum() + self.mean.square().sum() - len(root)) - self.raw.diagonal().sum()


def inducing_points(t: Training) -> None:
    """SVGP (Hensman et al., 2013) in double precision: the negative bound per sample, two optimizers."""
    n = 1024
    x = 4 * torch.rand(n, 2, dtype=torch.float64) - 2
    y = torch.sin(2 * x[:, 0]) * torch.cos(1.5 * x[:, 1]) + 0.1 * torch.randn(n, dtype=torch.float64)
    t.data = TensorDataset(x, (y - y.mean()) / y.std())
    t.model, t.batch_size, t.epochs = SVGP(x[torch.randperm(n)[:32]]), 64, 12

    def both(training: Training) -> list[Optimizer]:
        variational = [training.model.mean, training.model.raw]
        chosen = {id(p) for p in variational}
        others = [p for p in training.model.parameters() if id(p) not in chosen]
        return [Adam(variational, lr=0.05), Adam(others, lr=0.02)]

    def update(training: Training, batch: Batch) -> Tensor:
        x, y = batch
        model = training.model
        mu, var = model(x)
        noise = model.log_noise.exp()
        fit = -0.5 * (math.log(2 * math.pi) + model.log_noise + ((y - mu).square() + var) / noise)
        loss = model.kl() / n - fit.mean()
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in training.optimizers:
            optimizer.step()
        return loss.detach()

    t.optimizers_of, t.update = both, update
