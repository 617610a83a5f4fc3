"""Everyday programs with time series: demand of shops, quantiles of a load, words in sound."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from zoo.programs.training import Training


class Windows(Dataset):
    """Every stretch of ``lookback`` days of every shop, and the ``horizon`` days after it."""

    def __init__(self, sales, calendar, start, end, lookback=28, horizon=7):
        self.sales, self.calendar, self.lookback, self.horizon = sales, calendar, lookback, horizon
        last = end - lookback - horizon
        self.index = [(shop, day) for shop in range(len(sales)) for day in range(start, last + 1)]

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        shop, day = self.index[i]
        middle, end = day + self.lookback, day + self.lookback + self.horizon
        x = torch.cat([self.sales[shop, day:middle, None], self.calendar[day:middle]], 1)
        return x, self.sales[shop, middle:end]


class DemandLSTM(nn.Module):
    def __init__(self, n_features, hidden_size=32, num_layers=2, horizon=7):
        super().__init__()
        self.hidden_size, self.num_layers = hidden_size, num_layers
        self.lstm = nn.LSTM(n_features, hidden_size, num_layers, batch_first=True, dropout=0.1)
        self.fc = nn.Linear(hidden_size, horizon)

    def forward(self, x):
        h0 = torch.zeros(self.num_layers, x.size(0), self.hidden_size)
        c0 = torch.zeros(self.num_layers, x.size(0), self.hidden_size)
        out, _ = self.lstm(x, (h0, c0))
        return self.fc(out[:, -1])


def demand_windows(t: Training) -> None:
    """A week of sales of six shops from the four before; min-max scaled, plateaus, early stopping, best weights."""
    shops, days, train_end = 6, 210, 168
    day = torch.arange(days).float()
    weekly = torch.tensor([0.8, 0.85, 0.9, 1.0, 1.25, 1.5, 0.7])
    base = 20 + 60 * torch.rand(shops, 1)
    sales = base * weekly[(day.long() % 7)] * (1 + 0.2 * torch.sin(day / 15 + 6 * torch.rand(shops, 1)))
    sales = (sales * (1 + 0.08 * torch.randn(shops, days))).clamp_min(0)
    low, high = sales[:, :train_end].amin(1, keepdim=True), sales[:, :train_end].amax(1, keepdim=True)
    scaled = (sales - low) / (high - low)
    week = 2 * math.pi * day / 7
    calendar = torch.stack([week.sin(), week.cos()], 1)

    train_set = Windows(scaled, calendar, 0, train_end)
    val_set = Windows(scaled, calendar, train_end - 28, days)
    val_loader = DataLoader(val_set, batch_size=128)
    t.model, t.data, t.epochs = DemandLSTM(3), train_set, 7
    t.optimizers_of = lambda tr: [optim.Adam(tr.model.parameters(), lr=5e-3)]
    t.scheduler_of = lambda opt: optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=1)
    t.history = []

    def evaluate(model):
        model.eval()
        total, preds, truth = 0.0, [], []
        with torch.no_grad():
            for x, y in val_loader:
                out = model(x)
                total += F.mse_loss(out, y, reduction="sum").item()
                preds.append(out)
                truth.append(y)
        preds, truth = torch.cat(preds), torch.cat(truth)
        scale = torch.tensor([(high - low)[shop, 0] for shop, _ in val_set.index])[:, None]
        return total / truth.numel(), ((preds - truth).abs() * scale).mean().item()

    def fit(tr):
        optimizer, best, best_state, bad = tr.optimizers[0], float("inf"), None, 0
        for epoch in range(tr.epochs):
            tr.model.train()
            running = 0.0
            for x, y in tr.batches:
                optimizer.zero_grad(set_to_none=True)
                loss = F.mse_loss(tr.model(x), y)
                loss.backward()
                nn.utils.clip_grad_norm_(tr.model.parameters(), 1.0)
                optimizer.step()
                running += loss.item()
                yield loss.item()
            val_loss, val_mae = evaluate(tr.model)
            tr.scheduler.step(val_loss)
            t.history.append((epoch, running / len(tr.batches), val_loss, val_mae, optimizer.param_groups[0]["lr"]))
            if val_loss < best - 1e-5:
                best, best_state, bad = val_loss, copy.deepcopy(tr.model.state_dict()), 0
            else:
                bad += 1
                if bad == 3:
                    break
        tr.model.load_state_dict(best_state)

    t.loop = fit


class QuantileNet(nn.Module):
    """The lowest quantile, and softplus steps up from it: quantiles cannot cross."""

    def __init__(self, n_features, n_quantiles, width=64):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(n_features, width), nn.SiLU(), nn.Dropout(0.05), nn.Linear(width, width), nn.SiLU()
        )
        self.head = nn.Linear(width, n_quantiles)

    def forward(self, x):
        out = self.head(self.body(x))
        return torch.cumsum(torch.cat([out[:, :1], F.softplus(out[:, 1:])], 1), 1)


def electricity_quantiles(t: Training) -> None:
    """Load of the next hour from lags, the clock and the weather by pinball loss; coverage on the last two weeks."""
    hours, quantiles = 24 * 7 * 14, torch.tensor([0.1, 0.5, 0.9])
    time = torch.arange(hours)
    hour, weekday = time % 24, time // 24 % 7
    temperature = (
        12 + 6 * torch.sin(2 * math.pi * (hour - 9) / 24) + torch.randn(hours // 24).mul(3).repeat_interleave(24)
    )
    daily = 8 * torch.sin(2 * math.pi * (hour - 7) / 24) + 4 * torch.sin(4 * math.pi * hour / 24)
    load = 50 + daily * torch.where(weekday < 5, 1.0, 0.6) + 0.8 * (temperature - 16).clamp_min(0) ** 1.2
    load = load + (1 + 0.1 * (hour - 4).clamp_min(0)) * torch.randn(hours)

    lags = (1, 2, 24, 168)
    now = time[168:]
    clock = 2 * math.pi * hour[now] / 24
    numeric = torch.stack([*(load[now - lag] for lag in lags), temperature[now]], 1)
    split = len(now) - 24 * 14
    numeric = (numeric - numeric[:split].mean(0)) / numeric[:split].std(0)
    x = torch.cat([numeric, clock.sin()[:, None], clock.cos()[:, None], F.one_hot(weekday[now], 7)], 1)
    mean, std = load[now][:split].mean(), load[now][:split].std()
    y = (load[now] - mean) / std

    def pinball(model, batch):
        error = batch[1].unsqueeze(1) - model(batch[0])
        return torch.maximum(quantiles * error, (quantiles - 1) * error).mean()

    t.model, t.data, t.loss = QuantileNet(x.shape[1], 3), TensorDataset(x[:split], y[:split]), pinball
    t.batch_size, t.epochs = 64, 8
    t.optimizers_of = lambda tr: [optim.AdamW(tr.parameters(), lr=3e-3, weight_decay=1e-3)]
    t.scheduler_of = lambda opt: optim.lr_scheduler.CosineAnnealingLR(opt, T_max=8 * (split // 64))
    t.history = []

    def backtest(tr, epoch):
        tr.model.eval()
        with torch.no_grad():
            low, middle, high = tr.model(x[split:]).unbind(1)
            inside = ((y[split:] >= low) & (y[split:] <= high)).float().mean().item()
            mae = ((y[split:] - middle).abs().mean() * std).item()
            t.history.append({"epoch": epoch, "pinball": pinball(tr.model, (x[split:], y[split:])).item(), "mae": mae})
            t.history[-1]["coverage"] = inside
        tr.model.train()

    t.each_epoch.append(backtest)


class SeparableBlock(nn.Module):
    def __init__(self, n_in, n_out, stride):
        super().__init__()
        self.depthwise = nn.Conv2d(n_in, n_in, 3, stride, 1, groups=n_in, bias=False)
        self.pointwise = nn.Conv2d(n_in, n_out, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(n_in), nn.BatchNorm2d(n_out)

    def forward(self, x):
        x = F.relu(self.bn1(self.depthwise(x)))
        return F.relu(self.bn2(self.pointwise(x)))


def spoken_words(n, samples=1024):
    """Six "words": a chirp up or down at one of three pitches, somewhere in noise."""
    y = torch.randint(6, (n,))
    time = torch.arange(samples) / samples
    pitch, sweep = 60 + 70.0 * (y // 2)[:, None], torch.where(y % 2 == 0, 60.0, -60.0)[:, None]
    start = 0.4 * torch.rand(n, 1)
    local = time - start
    envelope = torch.sin(math.pi * local / 0.5).clamp_min(0) * ((local > 0) & (local < 0.5))
    tone = torch.sin(2 * math.pi * (pitch * local + sweep * local**2) + 6.28 * torch.rand(n, 1))
    return envelope * tone + 0.3 * torch.randn(n, samples), y


def keyword_spotting(t: Training) -> None:
    """Words from log spectrograms with masks of SpecAugment (Park et al., 2019) through separable convolutions."""
    waves, y = spoken_words(896)
    spectrogram = torch.stft(waves, 128, 64, window=torch.hann_window(128), return_complex=True).abs().pow(2)
    x = torch.log(spectrogram[:, :48] + 1e-3)
    mu, sigma = x[:640].mean((0, 2), keepdim=True), x[:640].std((0, 2), keepdim=True)
    x = ((x - mu) / sigma).unsqueeze(1)

    def spec_augment(batch):
        spec, target = batch[0].clone(), batch[1]
        for each in spec:
            f, f0 = int(torch.randint(6, ())), int(torch.randint(42, ()))
            w, w0 = int(torch.randint(4, ())), int(torch.randint(13, ()))
            each[:, f0 : f0 + f] = 0
            each[:, :, w0 : w0 + w] = 0
        return spec, target

    t.model = nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        SeparableBlock(16, 24, 1), SeparableBlock(24, 32, 2), nn.AdaptiveAvgPool2d((3, 1)), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(96, 6),
    )  # fmt: skip
    t.data, t.epochs, t.transform = TensorDataset(x[:640], y[:640]), 6, spec_augment
    t.loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)
    t.optimizers_of = lambda tr: [optim.SGD(tr.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)]
    t.scheduler_of = lambda opt: optim.lr_scheduler.CosineAnnealingLR(opt, T_max=120)
    t.confusions = []

    def evaluate(tr, epoch):
        tr.model.eval()
        with torch.inference_mode():
            predicted = tr.model(x[640:]).argmax(1)
        t.confusions.append(torch.bincount(6 * y[640:] + predicted, minlength=36).view(6, 6))
        tr.model.train()

    t.each_epoch.append(evaluate)


SERIES: dict[Callable[[Training], None], str] = {
    demand_windows: "series",
    electricity_quantiles: "regress",
    keyword_spotting: "series",
}
