"""Fine-tuning: a frozen network that somebody else has trained, low-rank adapters and a head that learn."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset, random_split

from zoo.hosts.report import Report, Watch
from zoo.hosts.worlds import new_task, pretrained


class Adapted(nn.Module):
    """``base(x) + scale * up(down(x))``, and ``up`` begins at zero."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.base = base
        self.drop = nn.Dropout(dropout)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * (self.drop(x) @ self.down.T @ self.up.T)


def adapt(model: nn.Module, rank: int, alpha: float, dropout: float) -> nn.Module:
    for p in model.parameters():
        p.requires_grad = False
    for name, child in model.named_children():
        if isinstance(child, nn.Linear) and name != "4":
            setattr(model, name, Adapted(child, rank, alpha, dropout))
    model.get_submodule("4").requires_grad_(True)
    return model


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader) -> tuple[float, float]:
    model.eval()
    loss, right, rows = 0.0, 0.0, 0
    for x, y in batches:
        log_probs = F.log_softmax(model(x), dim=-1)
        loss += F.nll_loss(log_probs, y, reduction="sum").item()
        right += (log_probs.argmax(-1) == y).float().sum().item()
        rows += y.shape[0]
    return loss / rows, right / rows


def train(watch: Watch, seed: int, epochs: int = 5) -> Report:
    torch.manual_seed(seed)
    data = TensorDataset(*new_task(seed, 2200))
    train_set, val_set = random_split(data, [1600, 600])
    train_batches = DataLoader(train_set, batch_size=64, shuffle=True)
    val_batches = DataLoader(val_set, batch_size=200)

    model = adapt(pretrained(), rank=4, alpha=8.0, dropout=0.05)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = AdamW(trainable, lr=1e-2, weight_decay=0.0)
    scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=epochs * len(train_batches), pct_start=0.2)
    losses, best, kept = [], float("inf"), {}
    with watch(model, optimizer, loader=train_batches, scheduler=scheduler):
        for _ in range(epochs):
            model.train()
            for x, y in train_batches:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                nn.utils.clip_grad_norm_(trainable, max_norm=2.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            val_loss, accuracy = evaluate(model, val_batches)
            if val_loss < best:
                best = val_loss
                kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
        model.load_state_dict(kept)
        val_loss, accuracy = evaluate(model, val_batches)
    return Report(model, {"loss": val_loss, "accuracy": accuracy}, losses)
