"""Zoo, group S: faults of the learning-rate schedule."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau, StepLR

from zoo.host import Attention, Watch, fault, host, loader, mlp, next_token_loss, sequences, table, train


@fault("S01", "schedule.unit_mismatch", delay="S", active=11)
def epoch_scheduler_per_batch(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = StepLR(optimizer, step_size=10)  # meant in epochs
    batches = loader(*table(seed), seed)
    with watch(model, optimizer, loader=batches, scheduler=scheduler):
        for _ in range(20):
            for _, x, y in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                scheduler.step()


@fault("S02", "schedule.unit_mismatch", delay="S", active=2)
def stepped_once_per_process(watch: Watch, seed: int) -> None:
    model, optimizer, batches = host(seed, torch.optim.AdamW, lr=1e-3)
    epochs, world_size = 10, 4
    total = epochs * len(batches)
    scheduler = LambdaLR(optimizer, lambda t: max(0.0, 1 - t / total))
    with watch(model, optimizer, loader=batches, scheduler=scheduler):
        for _ in range(epochs):
            for _, x, y in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                for _ in range(world_size):  # as a scheduler prepared by Accelerate does
                    scheduler.step()


@fault("S04", "schedule.cosine_climbs", delay="S", active=66)
def cosine_climbs(watch: Watch, seed: int) -> None:
    model, optimizer, batches = host(seed, torch.optim.AdamW, lr=3e-3)
    epochs = 8
    scheduler = CosineAnnealingLR(optimizer, T_max=epochs * len(batches) // 2)
    with watch(model, optimizer, loader=batches, scheduler=scheduler):
        for _ in range(epochs):
            for _, x, y in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                scheduler.step()


@fault("S05", "schedule.never_stepped", delay="S")
def warmup_never_stepped(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = LambdaLR(optimizer, lambda t: min(1.0, t / 10))
    batches = loader(*table(seed), seed)
    train(watch, model, optimizer, batches, epochs=5, scheduler=scheduler)


@fault("S06", "schedule.plateau_mode", delay="B", active=33)
def plateau_of_a_maximum(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = ReduceLROnPlateau(optimizer, mode="max", patience=2)
    batches = loader(*table(seed, n=512), seed)
    with watch(model, optimizer, loader=batches, scheduler=scheduler):
        for _ in range(16):
            total = 0.0
            for _, x, y in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                total += loss.item()
            scheduler.step(total / len(batches))


class PostBlock(nn.Module):
    """A post-norm transformer block (Vaswani et al. 2017)."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norm1 = Attention(d, heads), nn.LayerNorm(d)
        self.up, self.down, self.norm2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d), nn.LayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.down(F.relu(self.up(x))))


class PostGPT(nn.Module):
    """A stack of post-norm blocks; ``forward(ids (B, T)) -> logits (B, T, vocab)``."""

    def __init__(self, vocab: int = 33, length: int = 16, d: int = 64, layers: int = 6) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, d), nn.Embedding(length, d)
        self.blocks = nn.Sequential(*[PostBlock(d, heads=2) for _ in range(layers)])
        self.head = nn.Linear(d, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))))


@fault("S07", "optim.lr_too_high", delay="D")
def post_norm_without_warmup(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = PostGPT()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.016)
    ids = sequences(seed)
    batches = loader(ids, ids, seed, batch=16)
    train(watch, model, optimizer, batches, lambda x, y: next_token_loss(model(x), y), epochs=2)
