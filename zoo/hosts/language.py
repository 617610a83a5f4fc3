"""Text: a small causal transformer with tied embeddings, accumulation over micro-batches, warm-up and clipping."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from zoo.hosts.report import Report, Watch
from zoo.hosts.worlds import TOKENS, sentences


class CausalAttention(nn.Module):
    def __init__(self, d: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q.view(B, T, self.heads, D // self.heads).transpose(1, 2)
        k = k.view(B, T, self.heads, D // self.heads).transpose(1, 2)
        v = v.view(B, T, self.heads, D // self.heads).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(D // self.heads)
        future = torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        out = (self.drop(weights) @ v).transpose(1, 2).reshape(B, T, D)
        return self.proj(out)


class Layer(nn.Module):
    def __init__(self, d: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = CausalAttention(d, heads, dropout)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, length: int, d: int = 32, layers: int = 2, dropout: float = 0.05) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, d)
        self.positions = nn.Parameter(0.02 * torch.randn(length, d))
        self.layers = nn.ModuleList([Layer(d, 4, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, TOKENS, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.05)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1])
    targets = ids[:, 1:]
    return F.cross_entropy(logits.reshape(-1, TOKENS), targets.reshape(-1))


def lr_at(step: int, peak: float, warmup: int, total: int) -> float:
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / (total - warmup)
    return 0.1 * peak + 0.9 * peak * 0.5 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader) -> float:
    model.eval()
    losses = [next_token_loss(model, ids).item() for (ids,) in batches]
    model.train()
    return sum(losses) / len(losses)


def train(watch: Watch, seed: int, steps: int = 60, accumulation: int = 2) -> Report:
    torch.manual_seed(seed)
    text = sentences(seed, 640)
    batches = DataLoader(TensorDataset(text[:512]), batch_size=16, shuffle=True)
    held_out = DataLoader(TensorDataset(text[512:]), batch_size=64)

    model = Transformer(text.shape[1])
    optimizer = AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.95), weight_decay=0.01)
    losses, iterator = [], iter(batches)
    val_loss = evaluate(model, held_out)
    with watch(model, optimizer, loader=batches, accumulation=accumulation):
        model.train()
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = lr_at(step, 6e-3, 10, steps)
            total = 0.0
            for _ in range(accumulation):
                try:
                    (ids,) = next(iterator)
                except StopIteration:
                    iterator = iter(batches)
                    (ids,) = next(iterator)
                loss = next_token_loss(model, ids) / accumulation
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
            if (step + 1) % 20 == 0:
                val_loss = evaluate(model, held_out)
    return Report(model, {"loss": val_loss}, losses)
