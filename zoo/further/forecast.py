"""Forecasting: a causal transformer over windows of series, each scaled by itself, teacher forcing, early stopping."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset

from zoo.further.worlds import loads
from zoo.hosts.report import Report, Watch

PAST, AHEAD = 24, 6


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """What was seen and what follows, at each place of each series."""

    def __init__(self, series: Tensor, stride: int) -> None:
        self.series = series
        starts = range(0, series.shape[1] - PAST - AHEAD + 1, stride)
        self.places = [(row, start) for row in range(len(series)) for start in starts]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row, start = self.places[index]
        past = self.series[row, start : start + PAST]
        future = self.series[row, start + PAST : start + PAST + AHEAD]
        return past, future


class Forecaster(nn.Module):
    def __init__(self, d: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.into = nn.Linear(1, d)
        self.places = nn.Parameter(0.02 * torch.randn(PAST + AHEAD, d))
        layer = nn.TransformerEncoderLayer(d, heads, 2 * d, dropout=0.05, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(d)
        self.out = nn.Linear(d, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The next value after each of x (n, t)."""
        h = self.into(x.unsqueeze(-1)) + self.places[: x.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.layers(h, mask=mask, is_causal=True)
        return x + self.out(self.norm(h)).squeeze(-1)


def scale_of(past: Tensor) -> tuple[Tensor, Tensor]:
    return past.mean(dim=1, keepdim=True), past.std(dim=1, keepdim=True) + 1e-3


def loss_of(model: nn.Module, past: Tensor, future: Tensor) -> Tensor:
    mean, std = scale_of(past)
    whole = (torch.cat([past, future], dim=1) - mean) / std
    predicted = model(whole[:, :-1])
    return F.smooth_l1_loss(predicted, whole[:, 1:])


@torch.no_grad()
def forecast(model: nn.Module, past: Tensor) -> Tensor:
    mean, std = scale_of(past)
    known = (past - mean) / std
    for _ in range(AHEAD):
        after = model(known)[:, -1:]
        known = torch.cat([known, after], dim=1)
    return known[:, PAST:] * std + mean


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader) -> tuple[float, float]:
    """The loss with what was true, and the mean absolute error of a free forecast."""
    model.eval()
    total, error, count = 0.0, 0.0, 0
    for past, future in batches:
        total += loss_of(model, past, future).item() * len(past)
        error += (forecast(model, past) - future).abs().mean(dim=1).sum().item()
        count += len(past)
    model.train()
    return total / count, error / count


def train(watch: Watch, seed: int, epochs: int = 6) -> Report:
    torch.manual_seed(seed)
    series = loads(seed, 40)
    batches = DataLoader(Windows(series[:, :150], 4), batch_size=64, shuffle=True)
    held_out = DataLoader(Windows(series[:, 150:], 7), batch_size=60)

    model = Forecaster()
    optimizer = AdamW(model.parameters(), lr=5e-3, weight_decay=1e-2)
    scheduler = CosineAnnealingLR(optimizer, T_max=epochs, eta_min=1e-4)
    losses, shown, best, patience = [], (0.0, 0.0), float("inf"), 0
    with watch(model, optimizer, loader=batches, scheduler=scheduler):
        for _ in range(epochs):
            model.train()
            for past, future in batches:
                loss = loss_of(model, past, future)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.item())
            scheduler.step()
            shown = evaluate(model, held_out)
            patience = 0 if shown[0] < best else patience + 1
            best = min(best, shown[0])
            if patience >= 3:
                break
    return Report(model, {"loss": shown[0], "mae": shown[1]}, losses)
