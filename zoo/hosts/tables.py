"""Tables: standardised columns and an embedded category, AdamW in two groups, warm-up, the best weights kept."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from zoo.hosts.report import Report, Watch
from zoo.hosts.worlds import CLASSES, LEVELS, table


class Columns(nn.Module):
    """An MLP over numbers and one category."""

    def __init__(self, columns: int, width: int = 64) -> None:
        super().__init__()
        self.level = nn.Embedding(LEVELS, 8)
        self.first = nn.Linear(columns + 8, width)
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        h = torch.cat([x, self.level(level)], dim=1)
        h = self.drop(F.gelu(self.norm(self.first(h))))
        h = h + F.gelu(self.second(h))
        return self.head(h)


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def schedule(step: int, warmup: int, total: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader) -> tuple[float, float]:
    model.eval()
    loss, correct, count = 0.0, 0, 0
    for x, level, y in batches:
        logits = model(x, level)
        loss += F.cross_entropy(logits, y, reduction="sum").item()
        correct += (logits.argmax(dim=1) == y).sum().item()
        count += len(y)
    model.train()
    return loss / count, correct / count


def train(watch: Watch, seed: int, epochs: int = 6) -> Report:
    torch.manual_seed(seed)
    x, level, y = table(seed, 1700)
    order = torch.randperm(len(x))
    x, level, y = x[order], level[order], y[order]
    split = 1280
    mean, std = x[:split].mean(dim=0), x[:split].std(dim=0)
    x = (x - mean) / std
    train_batches = DataLoader(
        TensorDataset(x[:split], level[:split], y[:split]), batch_size=64, shuffle=True, drop_last=True
    )
    val_batches = DataLoader(TensorDataset(x[split:], level[split:], y[split:]), batch_size=105)

    model = Columns(x.shape[1])
    optimizer = AdamW(param_groups(model, weight_decay=0.05), lr=4e-3)
    total = epochs * len(train_batches)
    scheduler = LambdaLR(optimizer, lambda step: schedule(step, 10, total))

    best_loss, best, losses = float("inf"), model.state_dict(), []
    with watch(model, optimizer, loader=train_batches, scheduler=scheduler):
        for _ in range(epochs):
            model.train()
            for x_batch, level_batch, y_batch in train_batches:
                optimizer.zero_grad()
                logits = model(x_batch, level_batch)
                loss = F.cross_entropy(logits, y_batch)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                scheduler.step()
                losses.append(loss.item())
            val_loss, accuracy = evaluate(model, val_batches)
            if val_loss < best_loss:
                best_loss, best = val_loss, copy.deepcopy(model.state_dict())
        model.load_state_dict(best)
        val_loss, accuracy = evaluate(model, val_batches)
    return Report(model, {"loss": val_loss, "accuracy": accuracy}, losses, {"mean": mean, "std": std})
