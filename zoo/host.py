"""Shared by the programs of the zoo: the registry, small datasets, small models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

Watch = Callable[..., Any]
"""``tw.watch`` with ``out`` and ``quiet`` already set; called as ``watch(model, optimizer, loader=..., ...)``."""
Fixture = Callable[[Watch, int], Mapping[str, Any] | None]
"""``(watch, seed)``: trains. Returns the fault's true location, as fields of ``Finding.where``, or None: not scored."""


@dataclass(frozen=True)
class Entry:
    """One program. ``labels``: the finding codes accepted as its diagnosis, best first; empty for a healthy run.

    ``delay``: the class that limits how late it may be found: a key of ``judge.LATEST``, or D (divergence). ``active``:
    the first optimizer step, counted from 1, in which the fault shows.
    """

    id: str
    labels: tuple[str, ...]
    run: Fixture
    delay: str = ""
    active: int = 1
    fixable: bool = True

    @property
    def group(self) -> str:
        return self.id[0]


ENTRIES: dict[str, Entry] = {}


def fault(name: str, *labels: str, delay: str, active: int = 1, fixable: bool = True) -> Callable[[Fixture], Fixture]:
    """Registers a fault. ``fixable``: a change of model, data or configuration, not of the loop, repairs it."""

    def register(run: Fixture) -> Fixture:
        assert name not in ENTRIES, name
        ENTRIES[name] = Entry(name, labels, run, delay, active, fixable)
        return run

    return register


def healthy(name: str) -> Callable[[Fixture], Fixture]:
    def register(run: Fixture) -> Fixture:
        assert name not in ENTRIES, name
        ENTRIES[name] = Entry(name, (), run)
        return run

    return register


class Rows(Dataset[tuple[int, Tensor, Tensor]]):
    """Yields samples ``(index, x, target)``."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.y[index]


def table(seed: int, n: int = 1024, features: int = 20, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Classification by a noisy linear teacher: x (n, features) float32, y (n,) int64."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(features, classes, generator=g)
    x = torch.randn(n, features, generator=g)
    return x, (x @ weight + torch.randn(n, classes, generator=g)).argmax(1)


def images(seed: int, n: int = 512, classes: int = 4, size: int = 8) -> tuple[Tensor, Tensor]:
    """The pattern of each class plus noise: x (n, 1, size, size) float32, y (n,) int64."""
    g = torch.Generator().manual_seed(seed)
    patterns = torch.randn(classes, 1, size, size, generator=g)
    y = torch.randint(classes, (n,), generator=g)
    return patterns[y] + 0.7 * torch.randn(n, 1, size, size, generator=g), y


def sequences(seed: int, n: int = 512, length: int = 16, vocab: int = 33) -> Tensor:
    """Token ids 1..vocab-1, shape (n, length): each is its predecessor + 3, modulo; a tenth are random. 0 is unused."""
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(1, vocab, (n, 1), generator=g)
    ids = (start - 1 + 3 * torch.arange(length)) % (vocab - 1) + 1
    noise = torch.rand(n, length, generator=g) < 0.1
    return torch.where(noise, torch.randint(1, vocab, (n, length), generator=g), ids)


def loader(x: Tensor, y: Tensor, seed: int, *, batch: int = 64, shuffle: bool = True, **more: Any) -> DataLoader[Any]:
    """A DataLoader of Rows with one generator for the whole run."""
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(Rows(x, y), batch_size=batch, shuffle=shuffle, generator=generator, **more)


def train(
    watch: Watch,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: DataLoader[Any],
    loss_of: Callable[[Tensor, Tensor], Tensor] | None = None,
    *,
    epochs: int = 1,
    **watched: Any,
) -> None:
    """A plain loop. ``loss_of(x, target)`` is the cross-entropy of ``model(x)`` by default."""
    with watch(model, optimizer, loader=batches, **watched):
        for _ in range(epochs):
            for _, x, target in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), target) if loss_of is None else loss_of(x, target)
                loss.backward()
                optimizer.step()


def mlp(features: int = 20, classes: int = 10, width: int = 64) -> nn.Sequential:
    """A ReLU network with two hidden layers, for ``table``."""
    return nn.Sequential(
        nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
    )


def cnn(classes: int = 4, width: int = 8) -> nn.Sequential:
    """Two convolutions with BatchNorm, for ``images``."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes),
    )  # fmt: skip


def host(
    seed: int, kind: type[torch.optim.Optimizer], *, n: int = 1024, batch: int = 64, **options: Any
) -> tuple[nn.Sequential, torch.optim.Optimizer, DataLoader[Any]]:
    """``mlp()``, an optimizer of class ``kind`` with ``options``, and a loader of ``n`` samples of ``table``."""
    torch.manual_seed(seed)
    model = mlp()
    return model, kind(model.parameters(), **options), loader(*table(seed, n=n), seed, batch=batch)


class Attention(nn.Module):
    """Self-attention (B, T, D) -> (B, T, D) whose mask and scale a program can set wrong."""

    def __init__(self, d: int, heads: int, *, causal: bool = True, scale: float | None = None) -> None:
        super().__init__()
        self.heads, self.causal, self.scale = heads, causal, scale or (d // heads) ** -0.5
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (each.view(B, T, self.heads, -1).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * self.scale
        if self.causal:
            future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self, d: int, heads: int, *, dropout: float = 0.0, **attention: Any) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(d), Attention(d, heads, **attention)
        self.norm2, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class TinyGPT(nn.Module):
    """A small GPT: ``forward(ids (B, T)) -> logits (B, T, vocab)``."""

    def __init__(
        self, vocab: int = 33, length: int = 16, d: int = 32, heads: int = 2, layers: int = 2, **block: Any
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, d), nn.Embedding(length, d)
        self.blocks = nn.ModuleList([Block(d, heads, **block) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor, ids: Tensor, **more: Any) -> Tensor:
    """Cross-entropy of the logits at position t with the token at t + 1."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), **more)
