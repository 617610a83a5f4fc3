"""Models and optimizers for the tests of bundles. They are built in the test and again in another process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

KINDS = ["plain-fp32", "norm-fp32", "norm-bf16", "lstm-fp32", "again-fp32", "again-fp16", "norm-fp16", "sliced-fp32"]


class Lstm(nn.Module):
    """Counts its calls, and keeps a mean of its inputs in a list, which is not part of its state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.means = [torch.zeros(12)]
        self.lstm, self.head, self.calls = nn.LSTM(4, 8, 2, dropout=0.2, batch_first=True), nn.Linear(8, 3), 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        x = x - self.means[0].lerp_(x.detach().float().mean(0), 0.1)
        return self.head(self.lstm(x.view(-1, 3, 4))[0][:, -1] * (1 + 0.1 * self.calls))


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Dropout(0.2)), nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(checkpoint(self.inside, x, use_reentrant=False))


def build(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns the model and optimizer of a kind. ``built_*`` in a file of the test call it in the other process."""
    name = kind.split("-", maxsplit=1)[0]
    model: nn.Module
    if name == "lstm":
        model = Lstm()
    elif name == "again":
        model = Again()
    else:
        norm = nn.BatchNorm1d(24) if name == "norm" else nn.Identity()
        model = nn.Sequential(nn.Linear(12, 24), norm, nn.GELU(), nn.Dropout(0.2), nn.Linear(24, 3))
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return model, torch.optim.AdamW([{"params": rest, "weight_decay": 0.0}, {"params": decay}], lr=0.01)
