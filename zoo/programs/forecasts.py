"""Legal techniques with series over time: forecasts, walk-forward validation, events, anomalies."""

from __future__ import annotations

import io
import itertools
import math
import random

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, Subset, TensorDataset

from zoo.programs.training import Batch, Training


class RevIN(nn.Module):
    def __init__(self, num_features, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.affine_weight, self.affine_bias = (
            nn.Parameter(torch.ones(num_features)),
            nn.Parameter(torch.zeros(num_features)),
        )

    def forward(self, x, mode):
        if mode == "norm":
            self.mean = x.mean(1, keepdim=True).detach()
            self.stdev = torch.sqrt(x.var(1, keepdim=True, unbiased=False) + self.eps).detach()
            return (x - self.mean) / self.stdev * self.affine_weight + self.affine_bias
        x = (x - self.affine_bias) / (self.affine_weight + self.eps**2)
        return x * self.stdev + self.mean


class DLinear(nn.Module):
    """(batch, seq_len, channels) -> (batch, pred_len, channels)."""

    def __init__(self, seq_len, pred_len, channels, kernel=13):
        super().__init__()
        self.revin, self.kernel = RevIN(channels), kernel
        self.seasonal, self.trend = nn.Linear(seq_len, pred_len), nn.Linear(seq_len, pred_len)

    def forward(self, x):
        x = self.revin(x, "norm").transpose(1, 2)
        trend = F.avg_pool1d(F.pad(x, (self.kernel // 2, self.kernel // 2), mode="replicate"), self.kernel, stride=1)
        y = self.seasonal(x - trend) + self.trend(trend)
        return self.revin(y.transpose(1, 2), "denorm")


def revin_forecast(t: Training) -> None:
    """Reversible instance normalisation (Kim et al., 2022): a window's own mean and scale go out and come back in."""
    seq_len, pred_len, channels, border = 48, 12, 3, 640
    time = torch.arange(900.0)[:, None]
    level = torch.randn(900, channels).cumsum(0) * 0.12 + time * torch.tensor([0.004, -0.003, 0.0])
    season = torch.sin(time * 6.283 / torch.tensor([12.0, 24.0, 16.0])) + 0.5 * torch.sin(time * 6.283 / 8)
    series = (level + season + 0.15 * torch.randn(900, channels)) * torch.tensor([1.0, 20.0, 0.1])
    series = (series - series[:border].mean(0)) / series[:border].std(0)

    def windows(part):
        both = part.unfold(0, seq_len + pred_len, 1).transpose(1, 2)
        return both[:, :seq_len].contiguous(), both[:, seq_len:].contiguous()

    t.data = TensorDataset(*windows(series[:border]))
    vali = windows(series[border - seq_len :])
    t.model, t.epochs, t.lr = DLinear(seq_len, pred_len, channels), 10, 5e-3
    criterion, t.vali_loss = nn.MSELoss(), []

    def adjust_learning_rate(tr, epoch):
        for param_group in tr.optimizers[0].param_groups:
            param_group["lr"] = tr.lr * 0.8**epoch

    def vali_epoch(tr, epoch):
        tr.model.eval()
        with torch.no_grad():
            tr.vali_loss.append(criterion(tr.model(vali[0]), vali[1]).item())
        tr.model.train()

    t.loss = lambda model, batch: criterion(model(batch[0]), batch[1])
    t.each_epoch += [adjust_learning_rate, vali_epoch]


class LoadForecaster(nn.Module):
    def __init__(self, past_features, next_features, hidden=24):
        super().__init__()
        self.gru = nn.GRU(past_features, hidden, batch_first=True)
        self.fc = nn.Sequential(nn.Linear(hidden + next_features, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, past, ahead):
        _, state = self.gru(past)
        mean, raw = self.fc(torch.cat([state[-1], ahead], dim=1)).unbind(1)
        return mean, F.softplus(raw) + 1e-4


def simulate_load(days):
    hour = torch.arange(24 * days)
    temperature, load, drift, heat = torch.empty(len(hour)), torch.empty(len(hour)), 0.0, 0.0
    noise = torch.randn(len(hour), 2).tolist()
    for i, (a, b) in enumerate(noise):
        heat = 0.95 * heat + 0.8 * a
        drift = 0.9 * drift + (2.5 if 16 <= i % 24 <= 21 else 0.8) * b
        temperature[i] = 15 + 6 * math.sin(6.283 * (i % 24 - 9) / 24) + heat
        daily = 12 * math.sin(6.283 * (i % 24 - 8) / 24) + 6 * math.sin(6.283 * (i % 24) / 12)
        weekend = (i // 24) % 7 >= 5
        load[i] = 80 + daily * (0.5 if weekend else 1.0) + 0.8 * max(float(temperature[i]) - 18, 0.0) + drift
    return hour, temperature, load


def load_walk_forward(t: Training) -> None:
    """Gaussian likelihood with a variance of its own for each hour; walk-forward validation, the training set grows."""
    hour, temperature, load = simulate_load(110)
    lags, first = 24, 24 * 60
    scale = [(s[:first].mean(), s[:first].std()) for s in (load, temperature)]
    y, temp = (load - scale[0][0]) / scale[0][1], (temperature - scale[1][0]) / scale[1][1]
    clock = 6.2832 * (hour % 24) / 24
    weekend = ((hour // 24) % 7 >= 5).float()
    calendar = torch.stack([temp, clock.sin(), clock.cos(), (2 * clock).sin(), (2 * clock).cos(), weekend], dim=1)
    rows = torch.cat([y[:, None], calendar], dim=1)
    past = rows.unfold(0, lags, 1)[:-1].transpose(1, 2)  # hours i - lags ... i - 1 for target i
    ahead, target = calendar[lags:], y[lags:]

    t.model = LoadForecaster(rows.shape[1], ahead.shape[1])
    t.data, t.lr = TensorDataset(past, ahead, target), 5e-3
    cuts = [24 * day - lags for day in (60, 70, 80, 90, 100, 110)]
    t.folds = []

    def evaluate(model, begin, end):
        model.eval()
        with torch.no_grad():
            mean, var = model(past[begin:end], ahead[begin:end])
        error = target[begin:end] - mean
        return {
            "nll": F.gaussian_nll_loss(mean, target[begin:end], var).item(),
            "rmse": error.square().mean().sqrt().item() * scale[0][1].item(),
            "inside 90 %": (error.abs() < 1.645 * var.sqrt()).float().mean().item(),
        }

    def walk(tr):
        model, (optimizer,) = tr.model, tr.optimizers
        for fold, (end, until) in enumerate(itertools.pairwise(cuts)):
            loader = DataLoader(Subset(tr.data, range(end)), batch_size=64, shuffle=True, drop_last=True)
            for _ in range(4 if fold == 0 else 1):
                model.train()
                for x, a, v in loader:
                    mean, var = model(x, a)
                    loss = F.gaussian_nll_loss(mean, v, var)
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                    optimizer.step()
                    yield loss.detach()
            t.folds.append(evaluate(model, end, until))

    t.loop = walk


def _hawkes(rng: random.Random, events: int) -> tuple[list[float], list[int]]:
    """Ogata's thinning: two kinds of events, each of which brings more of the other."""
    base, jump, decay = (0.3, 0.15), ((0.1, 0.7), (0.5, 0.1)), 1.5
    excited, gaps, marks, waited = [0.0, 0.0], [], [], 0.0
    while len(gaps) < events:
        bound = sum(base) + sum(excited)
        step = rng.expovariate(bound)
        waited += step
        excited = [e * math.exp(-decay * step) for e in excited]
        now = [b + e for b, e in zip(base, excited)]
        drawn = rng.random() * bound
        if drawn < sum(now):
            mark = int(drawn >= now[0])
            excited = [e + jump[mark][k] * decay for k, e in enumerate(excited)]
            gaps.append(waited)
            marks.append(mark)
            waited = 0.0
    return gaps, marks


class NeuralIntensity(nn.Module):
    """softplus(a + (b - a) exp(-c s)) for each mark, s after the last event; a, b, c come from a GRU."""

    def __init__(self, marks: int, dim: int = 24) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(marks, 8), nn.GRU(9, dim, batch_first=True)
        self.begin = nn.Parameter(torch.zeros(1, 1, dim))
        self.head = nn.Linear(dim, 3 * marks)

    def forward(self, gaps: Tensor, marks: Tensor) -> tuple[Tensor, ...]:
        seen = torch.cat([self.embed(marks), torch.log1p(gaps).unsqueeze(-1)], -1)
        states = self.gru(seen[:, :-1])[0]
        states = torch.cat([self.begin.expand(len(gaps), -1, -1), states], 1)
        return self.head(states).chunk(3, -1)

    @staticmethod
    def intensity(parts: tuple[Tensor, ...], s: Tensor) -> Tensor:
        """s (n, events, draws) -> (n, events, draws, marks)"""
        a, b, c = (part.unsqueeze(2) for part in parts)
        return F.softplus(a + (b - a) * torch.exp(-F.softplus(c) * s.unsqueeze(-1)))


def self_exciting(t: Training) -> None:
    """A neural marked point process: log-intensities at events less an integral by random points."""
    rng = random.Random(t.seed)
    gaps, marks = map(torch.tensor, zip(*(_hawkes(rng, 20) for _ in range(512))))
    t.data = TensorDataset(gaps, marks)
    t.model, t.epochs, t.lr = NeuralIntensity(2), 12, 5e-3

    def update(training: Training, batch: Batch) -> Tensor:
        model, (optimizer,) = training.model, training.optimizers
        gaps, marks = batch
        parts = model(gaps, marks)
        at_event = model.intensity(parts, gaps.unsqueeze(-1)).squeeze(2)
        log_rate = at_event.gather(-1, marks.unsqueeze(-1)).squeeze(-1).log()
        draws = torch.rand(*gaps.shape, 8) * gaps.unsqueeze(-1)
        integral = model.intensity(parts, draws).sum(-1).mean(-1) * gaps
        loss = (integral - log_rate).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    t.update = update


class ConvAutoencoder(nn.Module):
    def __init__(self, channels=3, length=32, code=8):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(channels, 16, 5, stride=2, padding=2), nn.BatchNorm1d(16), nn.LeakyReLU(0.1),
            nn.Conv1d(16, 24, 5, stride=2, padding=2), nn.BatchNorm1d(24), nn.LeakyReLU(0.1),
            nn.Flatten(), nn.Linear(24 * length // 4, code),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(code, 24 * length // 4), nn.Unflatten(1, (24, length // 4)),
            nn.BatchNorm1d(24), nn.LeakyReLU(0.1),
            nn.ConvTranspose1d(24, 16, 4, stride=2, padding=1), nn.BatchNorm1d(16), nn.LeakyReLU(0.1),
            nn.ConvTranspose1d(16, channels, 4, stride=2, padding=1),
        )  # fmt: skip

    def forward(self, x):
        return self.decoder(self.encoder(x))


def pump_windows(n, faulty=False):
    """(n, 3, 32): vibration, pressure and current of a pump; a fault adds a shock or lets the pressure sag."""
    time, speed = torch.arange(32.0), 0.5 + 0.25 * torch.rand(n, 1)
    phase, load = 6.283 * torch.rand(n, 1), 0.5 + torch.rand(n, 1)
    vibration = load * torch.sin(speed * time + phase)
    pressure = 40 + 8 * speed + 1.5 * torch.cos(speed * time + phase)
    current = 12 + 3 * load + 0.6 * load * torch.sin(2 * (speed * time + phase))
    windows = torch.stack([vibration, pressure, current], 1)
    if faulty:
        at = torch.randint(4, 20, (n, 1))
        after = (time - at).clamp(min=0)
        shock = (time >= at) * torch.exp(-0.4 * after) * torch.cos(2.2 * after)
        kind = torch.rand(n, 1) < 0.5
        windows[:, 0] += torch.where(kind, 2.0 * shock, 0.0)
        windows[:, 1] -= torch.where(kind, 0.0, 0.35 * after)
    return windows + torch.tensor([0.1, 0.3, 0.15])[:, None] * torch.randn(n, 3, 32)


def pump_anomalies(t: Training) -> None:
    """Autoencoder of healthy windows; ExponentialLR, checkpoints in memory, a threshold from the validation errors."""
    healthy = pump_windows(1280)
    test = torch.cat([pump_windows(200), pump_windows(200, faulty=True)])
    broken = torch.arange(400) >= 200
    centre, spread = healthy[:1024].mean((0, 2), keepdim=True), healthy[:1024].std((0, 2), keepdim=True)
    x_train, x_val = ((part - centre) / spread for part in (healthy[:1024], healthy[1024:]))
    x_test = (test - centre) / spread

    t.model = ConvAutoencoder()
    t.data, t.batch_size, t.epochs = TensorDataset(x_train), 64, 10
    t.optimizers_of = lambda tr: [optim.AdamW(tr.parameters(), lr=4e-3, weight_decay=1e-4)]
    t.scheduler_of = lambda opt: ExponentialLR(opt, gamma=0.85)
    t.val_errors, t.report = [], {}

    @torch.no_grad()
    def scores(model, x):
        model.eval()
        return (model(x) - x).square().mean((1, 2))

    def fit(tr):
        model, (optimizer,), checkpoint = tr.model, tr.optimizers, io.BytesIO()
        for epoch in range(tr.epochs):
            model.train()
            for (x,) in tr.batches:
                noisy = x + 0.1 * torch.randn_like(x)
                loss = F.mse_loss(model(noisy), x)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                yield loss.item()
            tr.scheduler.step()
            tr.val_errors.append(scores(model, x_val).mean().item())
            if tr.val_errors[-1] == min(tr.val_errors):
                checkpoint = io.BytesIO()
                torch.save({"epoch": epoch, "model": model.state_dict()}, checkpoint)
        checkpoint.seek(0)
        model.load_state_dict(torch.load(checkpoint)["model"])
        alarm = scores(model, x_test) > scores(model, x_val).quantile(0.98)
        tr.report["recall"] = alarm[broken].float().mean().item()
        tr.report["false alarms"] = alarm[~broken].float().mean().item()

    t.loop = fit
