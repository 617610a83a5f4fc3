"""Small models with their loss, optimizer and batch, created on the default device, which the tracer sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainwright.engine.losses import cross_entropy, language_model
from trainwright.models.gpt import gpt
from trainwright.models.lora import add_lora
from trainwright.models.lstm import lstm
from trainwright.models.resnet import resnet
from trainwright.optim.choose import make_optimizer
from trainwright.plan.trace.traced_step import TracedObjects

Make = Callable[[torch.device], TracedObjects]


def example_ids() -> tuple[Tensor, Tensor]:
    ids = torch.zeros(4, 64, dtype=torch.int64)
    return ids, ids.clone()


def make_gpt(device: torch.device, *, optimizer: str = "adamw", **options: Any) -> TracedObjects:
    model = gpt(**{"vocab_size": 300, "block_size": 64, "layers": 3, "heads": 2, "d_model": 128, **options})
    return TracedObjects(model, language_model, make_optimizer(optimizer, model, lr=1e-4), example_ids())


def make_lora(device: torch.device) -> TracedObjects:
    model = add_lora(gpt(vocab_size=300, block_size=64, layers=3, heads=2, d_model=128), rank=4)
    return TracedObjects(model, language_model, make_optimizer("adamw", model, lr=1e-4), example_ids())


def make_resnet(device: torch.device) -> TracedObjects:
    model = resnet(depth=8, width=32)
    micro = (torch.zeros(32, 3, 32, 32), torch.zeros(32, dtype=torch.int64))
    return TracedObjects(model, cross_entropy, make_optimizer("sgd", model, lr=1e-4), micro)


def make_lstm(device: torch.device) -> TracedObjects:
    model = lstm(vocab_size=300, d_model=128)
    return TracedObjects(model, language_model, make_optimizer("adamw", model, lr=1e-4), example_ids())


def make_bert(device: torch.device) -> TracedObjects:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=300, **shape))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        ids, target = batch
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())

    return TracedObjects(model, loss, make_optimizer("adamw", model, lr=1e-4), example_ids())


def make_linear(device: torch.device, *, optimizer: bool = True) -> TracedObjects:
    """16 rows, 32 -> 64 -> 8."""
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 8, bias=False))
    chosen = torch.optim.AdamW(model.parameters(), lr=1e-3) if optimizer else None
    return TracedObjects(model, F.mse_loss, chosen, (torch.zeros(16, 32), torch.zeros(16, 8)))
