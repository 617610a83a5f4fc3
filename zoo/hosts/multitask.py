"""Multi-task: a shared trunk with two heads, missing targets, float16 with a loss scaler, a schedule by plateaus."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, Subset

from zoo.hosts.report import Report, Watch
from zoo.hosts.worlds import patients


class Patients(Dataset[dict[str, Tensor]]):
    def __init__(self, seed: int, n: int) -> None:
        self.x, self.kind, self.value = patients(seed, n)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        value = self.value[index]
        measured = ~torch.isnan(value)
        scaled = (torch.nan_to_num(value, nan=0.0) - 20.0) / 8.0
        return {"x": self.x[index], "kind": self.kind[index], "value": scaled, "measured": measured.float()}


class Heads(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU())
        self.kind = nn.Linear(width, 3)
        self.value = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.kind(h), self.value(h).squeeze(-1)


def losses_of(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    kind, value = model(batch["x"])
    kind_loss = F.cross_entropy(kind.float(), batch["kind"])
    error = (value.float() - batch["value"]).square() * batch["measured"]
    value_loss = error.sum() / batch["measured"].sum().clamp(min=1)
    return kind_loss, value_loss


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader) -> dict[str, float]:
    model.eval()
    totals = {"kind": 0.0, "value": 0.0, "loss": 0.0}
    for batch in batches:
        kind_loss, value_loss = losses_of(model, batch)
        totals["kind"] += kind_loss.item()
        totals["value"] += value_loss.item()
        totals["loss"] += kind_loss.item() + 2.0 * value_loss.item()
    model.train()
    return {name: total / len(batches) for name, total in totals.items()}


def train(watch: Watch, seed: int, epochs: int = 7) -> Report:
    torch.manual_seed(seed)
    data = Patients(seed, 1400)
    order = torch.randperm(len(data)).tolist()
    train_batches = DataLoader(Subset(data, order[:960]), batch_size=64, shuffle=True)
    val_batches = DataLoader(Subset(data, order[960:]), batch_size=110)

    model = Heads()
    optimizer = AdamW(
        [{"params": model.trunk.parameters()}, {"params": [*model.kind.parameters(), *model.value.parameters()]}],
        lr=4e-3,
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    scheduler = ReduceLROnPlateau(optimizer, mode="min", factor=0.3, patience=0)
    losses, shown = [], {}
    with watch(model, optimizer, loader=train_batches, scaler=scaler, scheduler=scheduler):
        for _ in range(epochs):
            model.train()
            for batch in train_batches:
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    kind_loss, value_loss = losses_of(model, batch)
                    loss = kind_loss + 2.0 * value_loss
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), max_norm=5.0)
                scaler.step(optimizer)
                scaler.update()
                losses.append(loss.item())
            shown = evaluate(model, val_batches)
            scheduler.step(shown["loss"])
    return Report(model, shown, losses)
