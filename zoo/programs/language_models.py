"""Legal techniques with small language models: tied weights, weights on a sphere, orthogonalised steps."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from zoo.programs.training import Training


class CharTransformer(nn.Module):
    def __init__(self, vocab_size, block=40, dim=48, heads=4, depth=2, dropout=0.1):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, dim), nn.Embedding(block, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(dim), enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(block))
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids):
        length = ids.size(1)
        x = self.tokens(ids) + self.positions(torch.arange(length))
        return self.head(self.blocks(x, mask=self.mask[:length, :length], is_causal=True))


def tied_char_lm(t: Training) -> None:
    """Weight tying, random windows of a text, two micro-batches a step, decay of the matrices only, warmup + cosine."""
    rng = random.Random(t.seed)
    who, verb, what, where = (
        "the cat|a farmer|my sister|the old king|nobody|our teacher", "sees|paints|sells|finds|likes|carries",
        "a red boat|the moon|some bread|two apples|the letter|a song", "in the garden|by the river|at night|today",
    )  # fmt: skip
    parts = [each.split("|") for each in (who, verb, what, where)]
    text = " ".join(" ".join(map(rng.choice, parts)) + "." for _ in range(600))
    chars = sorted(set(text))
    data = torch.tensor([chars.index(c) for c in text])
    cut = int(0.9 * len(data))
    splits, block, micro = {"train": data[:cut], "val": data[cut:]}, 40, 8
    max_iters, warmup, max_lr, min_lr = 140, 15, 4e-3, 4e-4
    t.model, t.accumulation, t.val_bits = CharTransformer(len(chars), block), 2, []

    def get_batch(split, size):
        source = splits[split]
        starts = torch.randint(len(source) - block, (size, 1))
        window = source[starts + torch.arange(block + 1)]
        return window[:, :-1], window[:, 1:]

    def get_lr(it):
        if it < warmup:
            return max_lr * (it + 1) / warmup
        progress = (it - warmup) / (max_iters - warmup)
        return min_lr + 0.5 * (max_lr - min_lr) * (1 + math.cos(math.pi * progress))

    def token_loss(model, x, y):
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    def configure(tr):
        decay = [p for p in tr.parameters() if p.dim() >= 2]
        rest = [p for p in tr.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return [optim.AdamW(groups, lr=max_lr, betas=(0.9, 0.95))]

    def train(tr):
        model, (optimizer,) = tr.model, tr.optimizers
        model.train()
        for it in range(max_iters):
            for group in optimizer.param_groups:
                group["lr"] = get_lr(it)
            total = 0.0
            for _ in range(tr.accumulation):
                loss = token_loss(model, *get_batch("train", micro)) / tr.accumulation
                loss.backward()
                total += loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if it % 35 == 34:
                model.eval()
                with torch.no_grad():
                    t.val_bits.append(token_loss(model, *get_batch("val", 32)).item() / math.log(2))
                model.train()
            yield total

    t.optimizers_of, t.loop, t.loaded = configure, train, False


def justnorm(x: Tensor, dim: int = -1) -> Tensor:
    return x / x.norm(p=2, dim=dim, keepdim=True)


def rotary(x: Tensor) -> Tensor:
    T, D = x.shape[-2:]
    freq = 1.0 / (100.0 ** (torch.arange(0, D, 2) / D))
    angle = torch.arange(T)[:, None] * freq
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * angle.cos() - x2 * angle.sin(), x1 * angle.sin() + x2 * angle.cos()], dim=-1)


class Scale(nn.Module):
    """A learned vector whose effective rate is decoupled from its initial value."""

    def __init__(self, size, init_value, init_scaling):
        super().__init__()
        self.value = nn.Parameter(torch.full((size,), init_scaling))
        self.ratio = init_value / init_scaling

    def forward(self):
        return self.value * self.ratio


class NormalizedBlock(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        base = d**-0.5
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.att_proj = nn.Linear(d, d, bias=False)
        self.fc = nn.Linear(d, 4 * d, bias=False)
        self.mlp_proj = nn.Linear(2 * d, d, bias=False)
        self.sqk, self.suv = Scale(d, 1.0, base), Scale(4 * d, 1.0, 1.0)
        self.attn_alpha, self.mlp_alpha = Scale(d, 0.2, base), Scale(d, 0.2, base)

    def forward(self, h):
        B, T, C = h.shape
        q, k, v = (lin(h).view(B, T, self.heads, -1).transpose(1, 2) for lin in (self.q, self.k, self.v))
        sqk = self.sqk().view(self.heads, 1, -1)
        q, k = sqk * justnorm(rotary(q)), sqk * justnorm(rotary(k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=(C // self.heads) ** 0.5)
        h_att = justnorm(self.att_proj(y.transpose(1, 2).reshape(B, T, C)))
        h = justnorm(h + self.attn_alpha().abs() * (h_att - h))
        u, g = (self.suv() * C**0.5 * self.fc(h)).chunk(2, dim=-1)
        h_mlp = justnorm(self.mlp_proj(u * F.silu(g)))
        return justnorm(h + self.mlp_alpha().abs() * (h_mlp - h))


class NormalizedGPT(nn.Module):
    def __init__(self, vocab=33, d=32, heads=2, layers=2):
        super().__init__()
        self.wte = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(NormalizedBlock(d, heads) for _ in range(layers))
        self.lm_head = nn.Linear(d, vocab, bias=False)
        self.sz = Scale(vocab, 1.0, d**-0.5)
        self.normalize_matrices()

    @torch.no_grad()
    def normalize_matrices(self):
        into = [self.wte, self.lm_head] + [m for b in self.blocks for m in (b.q, b.k, b.v, b.fc)]
        for m in into:
            m.weight.copy_(justnorm(m.weight, 1))
        for b in self.blocks:
            b.att_proj.weight.copy_(justnorm(b.att_proj.weight, 0))
            b.mlp_proj.weight.copy_(justnorm(b.mlp_proj.weight, 0))

    def forward(self, idx):
        h = self.wte(idx)
        for block in self.blocks:
            h = block(h)
        return self.sz() * self.lm_head(h)


def hypersphere_gpt(t: Training) -> None:
    """nGPT (Loshchilov et al., 2024): all matrices are normalised after every step."""
    t.model = NormalizedGPT()
    t.epochs, t.lr = 8, 1e-2
    t.optimizers_of = lambda training: [AdamW(training.parameters(), lr=t.lr, betas=(0.9, 0.95), weight_decay=0.0)]
    t.scheduler_of = lambda optimizer: CosineAnnealingLR(optimizer, T_max=160)
    t.each_step.append(lambda training: training.model.normalize_matrices())


def newton_schulz(G: Tensor, steps: int = 5) -> Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G / (G.norm() + 1e-7)
    transposed = X.size(0) > X.size(1)
    if transposed:
        X = X.T
    for _ in range(steps):
        A = X @ X.T
        B = b * A + c * A @ A
        X = a * X + B @ X
    return X.T if transposed else X


class Muon(Optimizer):
    """Momentum orthogonalised by Newton-Schulz (Jordan et al., 2024)."""

    def __init__(self, params, lr=0.02, momentum=0.95, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad
                if g is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buf = state["momentum_buffer"]
                buf.lerp_(g, 1 - group["momentum"])
                update = newton_schulz(g.lerp(buf, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)


def orthogonalised_momentum(t: Training) -> None:
    """Muon for the hidden matrices of a transformer, AdamW for embeddings, norms, biases and head."""
    hidden = [p for p in t.model.blocks.parameters() if p.ndim == 2]
    ids = {id(p) for p in hidden}
    others = [p for p in t.model.parameters() if id(p) not in ids]
    total = 160

    t.optimizers_of = lambda training: [
        Muon(hidden, lr=0.02, weight_decay=0.01),
        AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01),
    ]

    def train(training):
        schedules = [
            LambdaLR(opt, lambda s: min(1.0, (s + 1) / 10) * min(1.0, (total - s) / (0.4 * total)))
            for opt in training.optimizers
        ]
        step = 0
        while step < total:
            for tokens, _ in training.batches:
                logits = training.model(tokens[:, :-1])
                loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), tokens[:, 1:].reshape(-1))
                for opt in training.optimizers:
                    opt.zero_grad(set_to_none=True)
                loss.backward()
                for opt, sched in zip(training.optimizers, schedules):
                    opt.step()
                    sched.step()
                step += 1
                yield loss.detach()
                if step == total:
                    break

    t.loop = train
