"""nanoGPT's model and training loop with its settings for a CPU: the plain loop of ``time_to_loss``.

Based on github.com/karpathy/nanoGPT (model.py, train.py, and the README's settings for a laptop): 4 layers, 4 heads,
width 128, no biases, GELU, tied head, windows of 64 at random positions, batch 12, AdamW (0.9, 0.99) at 1e-3 in torch's
default implementation, weight decay 0.1, warm-up of 100 steps, cosine to a tenth, clipping at 1, fp32, not compiled.
Shapes: B batch, T positions, D width, V vocabulary.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS, HEADS, WIDTH, BLOCK, BATCH = 4, 4, 128, 64, 12
LR, LEAST_LR, WARMUP, DECAY, CLIP_AT = 1e-3, 1e-4, 100, 0.1, 1.0
INIT_STD = 0.02


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH, bias=False)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.LayerNorm(WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        joined = self.query_key_value(self.attention_norm(x_BTD)).chunk(3, dim=-1)
        query, key, value = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in joined)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTD = x_BTD + self.output(mixed.transpose(1, 2).flatten(2))
        change_BTD: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x_BTD))))
        return x_BTD + change_BTD


class NanoGPT(nn.Module):
    """ids_BT -> logits_BTV."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, WIDTH)
        self.positions = nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        for name, parameter in self.named_parameters():
            residual = name.endswith(("output.weight", "down.weight"))
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=INIT_STD / math.sqrt(2 * LAYERS) if residual else INIT_STD)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.tokens(ids_BT) + self.positions.weight[: ids_BT.shape[1]]
        return F.linear(self.norm(self.blocks(x_BTD)), self.tokens.weight)


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Returns groups with weight decay for parameters of two or more dimensions, as nanoGPT's configure_optimizers."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def learning_rate(step: int, since_warmup: float) -> float:
    """Returns the learning rate of nanoGPT's get_lr. ``since_warmup``: fraction of the time budget after the warm-up.

    nanoGPT uses the fraction of the steps, whose number is not known in advance here.
    """
    if step < WARMUP:
        return LR * (step + 1) / (WARMUP + 1)
    return LEAST_LR + 0.5 * (1 + math.cos(math.pi * since_warmup)) * (LR - LEAST_LR)


def train(model: NanoGPT, ids: Tensor, budget_s: float) -> tuple[int, float]:
    """Trains on the flat sequence ``ids`` for ``budget_s``. Returns the number of steps and their time in seconds."""
    optimizer = torch.optim.AdamW(param_groups(model), lr=LR, betas=(0.9, 0.99))
    step, elapsed_s, warm_s = 0, 0.0, 0.0
    while elapsed_s < budget_s:
        begin_s = time.perf_counter()
        lr = learning_rate(step, (elapsed_s - warm_s) / (budget_s - warm_s))
        for group in optimizer.param_groups:
            group["lr"] = lr
        starts = torch.randint(len(ids) - BLOCK, (BATCH,)).tolist()
        x_BT = torch.stack([ids[start : start + BLOCK] for start in starts])
        y_BT = torch.stack([ids[start + 1 : start + 1 + BLOCK] for start in starts])
        loss = F.cross_entropy(model(x_BT).flatten(0, 1), y_BT.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_AT)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        elapsed_s += time.perf_counter() - begin_s
        if step == WARMUP:
            warm_s = elapsed_s
    return step, elapsed_s
