"""Zoo, group P: faults of number formats and loss scaling."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.host import TinyGPT, Watch, fault, host, loader, mlp, next_token_loss, sequences, table, train


class GatedFeedForward(nn.Module):
    """A residual gated feed-forward block with weights of std 1/sqrt(fan in)."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.gate, self.up, self.down = nn.LayerNorm(d), *[nn.Linear(d, d, bias=False) for _ in range(3)]
        for linear in (self.gate, self.up, self.down):
            nn.init.normal_(linear.weight, std=d**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.gelu(self.gate(h)) * self.up(h))


class ResidualNet(nn.Module):
    def __init__(self, d: int = 64, blocks: int = 3) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(20, d), nn.ModuleList([GatedFeedForward(d) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@fault("P01", "precision.fp16_overflow", delay="N")
def activations_overflow(watch: Watch, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model, hot = ResidualNet(), seed % 3
    with torch.no_grad():  # weights as of training in fp32 or bf16: their activations exceed the range of fp16
        for linear in (model.blocks[hot].gate, model.blocks[hot].up, model.blocks[hot].down):
            linear.weight.mul_(40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = loader(*table(seed), seed)
    with watch(model, optimizer, loader=batches):
        for _ in range(2):
            for _, x, y in batches:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
    return {"module": f"blocks.{hot}.down", "op": "linear", "dtype": "float16"}


@fault("P02", "precision.fp16_underflow", delay="S")
def gradients_underflow(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    ids = sequences(seed)
    batches = loader(ids, ids, seed)
    weight = 1e-3 if seed % 2 == 0 else 1e-4  # with 1e-4 nearly all gradients underflow
    with watch(model, optimizer, loader=batches, scaler=scaler):
        for _ in range(3):
            for _, x, y in batches:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    loss = weight * next_token_loss(model(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()


class Reader(nn.Module):
    """Classifies padded token ids (0 is padding): one bidirectional attention, the mean over tokens, a linear layer."""

    def __init__(self, vocab: int = 33, d: int = 32, classes: int = 4) -> None:
        super().__init__()
        self.tokens, self.attend, self.head = nn.Embedding(vocab, d), SoftMaskAttention(d), nn.Linear(d, classes)

    def forward(self, ids: Tensor) -> Tensor:
        is_real = (ids != 0).unsqueeze(2)
        read = self.attend(self.tokens(ids), ids == 0) * is_real
        return self.head(read.sum(1) / is_real.sum(1).clamp(min=1))


class SoftMaskAttention(nn.Module):
    """Attention that adds -1e9 to the scores of padding: more than fp16 can hold."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(d, 3 * d)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) * x.shape[-1] ** -0.5
        scores = scores + padding[:, None].to(scores.dtype) * -1e9
        return scores.softmax(-1) @ v


@fault("P03", "precision.softmax_over_masked_row", delay="N", active=5)
def mask_overflows(watch: Watch, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    ids = sequences(seed)
    kinds = ids[:, 0] % 4
    ids[torch.arange(16) >= torch.randint(4, 17, (len(ids), 1))] = 0
    blank = 4 * 32 + 5 * seed  # an empty document, in the fifth batch
    ids[blank] = 0
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu")
    batches = loader(ids, kinds, seed, batch=32, shuffle=False)
    with watch(model, optimizer, loader=batches, scaler=scaler):
        for _ in range(2):
            for _, x, y in batches:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    loss = F.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    return {"sample_ids": [blank], "module": "attend", "dtype": "float16"}


@fault("P04", "precision.eps_underflow", delay="N")
def eps_underflows(watch: Watch, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = mlp().half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8)
    batches = loader(*table(seed), seed)
    train(watch, model, optimizer, batches, lambda x, y: F.cross_entropy(model(x.half()).float(), y), epochs=2)
    return {"dtype": "float16"}


@fault("P05", "precision.lost_updates", delay="S")
def updates_lost(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    batches = loader(*table(seed), seed)
    train(watch, model, optimizer, batches, lambda x, y: F.cross_entropy(model(x.bfloat16()).float(), y), epochs=5)


def contrast(z: Tensor, temperature: float = 0.07) -> Tensor:
    """NT-Xent loss of two views without log-sum-exp; z (2N, d): rows i and i + N are views of the same sample."""
    z = F.normalize(z, dim=-1)
    likeness = torch.exp(z @ z.T / temperature)
    others = likeness * ~torch.eye(len(z), dtype=torch.bool)
    n = len(z) // 2
    together = torch.cat([likeness.diagonal(n), likeness.diagonal(-n)])
    return -(together / others.sum(1)).log().mean()


@fault("P07", "precision.scaler_collapse", "precision.fp16_overflow", delay="S")
def scaler_collapses(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp(classes=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    batches = loader(*table(seed), seed)
    with watch(model, optimizer, loader=batches, scaler=scaler):
        for _ in range(5):
            for _, x, _ in batches:
                views = torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    loss = contrast(model(views))
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()


@fault("P08", "precision.cancellation", delay="S")
def divergence_cancels(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    teacher = mlp(classes=256)
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        for p in student.parameters():
            p.add_(0.15 * p.std() * torch.randn_like(p))
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5)
    batches = loader(*table(seed), seed)
    with watch(student, optimizer, loader=batches):
        for _ in range(5):
            for _, x, _ in batches:
                optimizer.zero_grad()
                with torch.no_grad():
                    target = F.log_softmax(teacher(x).bfloat16(), -1)
                guess = F.log_softmax(student(x).bfloat16(), -1)
                loss = F.kl_div(guess, target, log_target=True, reduction="batchmean")
                loss.backward()
                optimizer.step()


@fault("P10", "precision.lost_accumulation", delay="S")
def accumulation_lost(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = loader(*table(seed, n=4096), seed, batch=4)
    accumulate = 64 if seed % 2 == 0 else 256
    with watch(model, optimizer, loader=batches):
        for _ in range(2):
            for i, (_, x, y) in enumerate(batches):
                loss = F.cross_entropy(model(x.bfloat16()).float(), y) / accumulate
                loss.backward()
                if (i + 1) % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()


@fault("P12", "precision.autocast_stale_cache", delay="S", fixable=False)
def autocast_round_the_loop(watch: Watch, seed: int) -> None:
    model, optimizer, batches = host(seed, torch.optim.AdamW, lr=1e-3)
    with watch(model, optimizer, loader=batches), torch.autocast("cpu", torch.bfloat16):
        for _ in range(5):
            for _, x, y in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()


class Experts(nn.Module):
    """Top-1 mixture of experts whose router runs in fp16; ``forward(x (N, d)) -> (y (N, d), aux ())``."""

    def __init__(self, d: int = 16, experts: int = 64) -> None:
        super().__init__()
        self.router = nn.Linear(d, experts)
        self.weight = nn.Parameter(torch.randn(experts, d, d) * d**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens, experts = len(x), len(self.weight)
        share = self.router(x).half().softmax(-1)
        gate, chosen = share.max(-1)
        load = chosen.bincount(minlength=experts).half() / tokens
        aux = experts * (1e-3 * (share / tokens) * load).sum()
        return x + gate[:, None].float() * torch.einsum("nd,nde->ne", x, self.weight[chosen]), aux


class Mixture(nn.Module):
    """``Experts`` between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.experts, self.head = nn.Linear(20, 16), Experts(), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, aux = self.experts(self.stem(x))
        return self.head(y), aux


@fault("P13", "precision.fp16_underflow", delay="S")
def balance_loss_underflows(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = Mixture()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = loader(*table(seed, n=8192), seed, batch=2048)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        logits, aux = model(x)
        return F.cross_entropy(logits, y) + aux

    train(watch, model, optimizer, batches, loss_of, epochs=6)
