"""Zoo, group M: faults of the model, in plain PyTorch loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from zoo.host import TinyGPT, Watch, cnn, fault, images, loader, mlp, next_token_loss, sequences, table

Step = Callable[[nn.Module, Tensor, Tensor], Tensor]


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def predict_next(model: nn.Module, ids: Tensor, _: Tensor) -> Tensor:
    return next_token_loss(model(ids), ids)


def train(
    watch: Watch, model: nn.Module, data: DataLoader[Any], loss: Step = classify, *, lr: float = 1e-3, epochs: int = 3
) -> None:
    """A plain loop with Adam, for faults of the model or the loss. ``loss(model, x, y)`` is a scalar."""
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=lr)
    with watch(model, optimizer, loader=data):
        model.train()
        for _ in range(epochs):
            for _, x, y in data:
                optimizer.zero_grad()
                loss(model, x, y).backward()
                optimizer.step()


def drawn_in(step: int, data: DataLoader[Any], seed: int) -> int:
    """Index of one sample of batch ``step``, counted from 1. ``data``: a loader with the order of the later run."""
    ids = next(islice(data, step - 1, None))[0]
    return int(ids[(7 * seed + 3) % len(ids)])


@fault("M01", "gradient.vanishing", delay="S")
def twenty_sigmoids(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    layers = [layer for d in [20] + 19 * [32] for layer in (nn.Linear(d, 32), nn.Sigmoid())]
    train(watch, nn.Sequential(*layers, nn.Linear(32, 10)), loader(*table(seed), seed))


@fault("M02", "model.dead_relu", delay="S")
def relu_below_zero(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp()
    nn.init.constant_(model[seed % 2 * 2].bias, -10.0)
    train(watch, model, loader(*table(seed), seed))


@fault("M04", "model.missing_nonlinearity", delay="S")
def only_linear(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, _ = table(seed)
    model = nn.Sequential(nn.Linear(20, 64), nn.Linear(64, 64), nn.Linear(64, 2))
    train(watch, model, loader(x, (x[:, 0] * x[:, 1] > 0).long(), seed))


class HiddenList(nn.Module):
    """Hidden layers in a Python list: ``parameters()`` does not see them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 32), nn.Linear(32, 10)
        self.hidden = [nn.Linear(32, 32) for _ in range(3)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        for layer in self.hidden:
            x = x + layer(x).relu()
        return self.last(x)


@fault("M05", "optim.params_not_registered", delay="S")
def layers_in_a_list(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    train(watch, HiddenList(), loader(*table(seed), seed))


class TimeFirst(nn.Module):
    """A GRU whose input (B, T, D) is brought to (T, B, D) with ``view``, which mixes samples, not ``transpose``."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.rnn, self.head = nn.Embedding(33, 16), nn.GRU(16, 32), nn.Linear(32, 33)

    def forward(self, ids_BT: Tensor) -> Tensor:
        B, T = ids_BT.shape
        h_TBD, _ = self.rnn(self.tokens(ids_BT).view(T, B, -1))
        return self.head(h_TBD.view(B, T, -1))


@fault("M07", "model.mixes_samples", "model.view_reorders_axes", delay="S")
def view_for_transpose(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    ids = sequences(seed)
    train(watch, TimeFirst(), loader(ids, ids, seed, batch=32), predict_next, lr=3e-3, epochs=2)


@fault("M08", "model.bn_tiny_batch", delay="B")
def batchnorm_of_two(watch: Watch, seed: int) -> None:
    """Batches of 2, reduced from 8x8 to 1x1: the last BatchNorm normalises over two values per channel."""
    torch.manual_seed(seed)
    blocks = [(nn.Conv2d(d, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for d in (1, 16, 16)]
    model = nn.Sequential(*sum(blocks, ()), nn.Flatten(), nn.Linear(16, 4))
    train(watch, model, loader(*images(seed, n=240), seed, batch=2), lr=3e-3, epochs=1)


@fault("M09", "model.running_statistics_nonfinite", delay="N", active=6)
def nan_in_running_stats(watch: Watch, seed: int) -> Mapping[str, Any]:
    """The loop skips the NaN loss, but its forward pass has already written NaN into the running statistics."""
    torch.manual_seed(seed)
    x, y = images(seed, n=1088)
    bad = drawn_in(6, loader(x[:1024], y[:1024], seed, batch=32), seed)
    x[bad, 0, 0, 0] = torch.nan
    model = cnn()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = loader(x[:1024], y[:1024], seed, batch=32)
    with watch(model, optimizer, loader=data):
        model.train()
        for _, batch, target in data:
            loss = F.cross_entropy(model(batch), target)
            if torch.isfinite(loss):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        model.eval()
        with torch.no_grad():
            F.cross_entropy(model(x[1024:]), y[1024:])
    return {"sample_ids": [bad], "module": "1", "dtype": "float32"}


@fault("M10", "model.excess_dropout", delay="B")
def dropout_of_nine_tenths(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    net = mlp()
    model = nn.Sequential(*net[:4], nn.Dropout(0.9), net[4])  # type: ignore[misc]
    train(watch, model, loader(*table(seed), seed), lr=1e-2, epochs=6)


class Encoder(nn.Module):
    """Classifies a text by self-attention and the mean over its tokens, both without padding (0)."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.tokens, self.attention, self.head = nn.Embedding(33, d), KeyMasked(d), nn.Linear(d, 4)

    def forward(self, ids: Tensor) -> Tensor:
        there = ids != 0
        h = self.attention(self.tokens(ids), there) * there[..., None]
        return self.head(h.sum(1) / there.sum(1, keepdim=True).clamp(min=1))


class KeyMasked(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(d, 3 * d)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        return scores.masked_fill(~there[:, None], -torch.inf).softmax(-1) @ v


@fault("M11", "precision.softmax_over_masked_row", delay="N", active=5)
def every_key_masked(watch: Watch, seed: int) -> Mapping[str, Any]:
    torch.manual_seed(seed)
    ids = sequences(seed, n=1024)
    ids[torch.arange(16) >= torch.randint(4, 17, (1024, 1))] = 0
    labels = ids[:, 0] % 4
    empty = drawn_in(5, loader(ids, labels, seed, batch=32), seed)
    ids[empty] = 0
    train(watch, Encoder(), loader(ids, labels, seed, batch=32), lr=3e-3, epochs=1)
    return {"sample_ids": [empty], "op": "softmax", "module": "attention", "dtype": "float32"}


@fault("M13", "model.attention_logit_growth", delay="D")
def no_attention_scale(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    ids = sequences(seed)
    data = loader(ids, ids, seed, batch=32)
    train(watch, TinyGPT(d=64, heads=1, scale=1.0), data, predict_next, lr=2.5e-2, epochs=4)


class Rotary(nn.Module):
    """One layer of attention with rotary embeddings, whose angles are computed from bf16 positions."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.tokens, self.qkv, self.head = nn.Embedding(33, d), nn.Linear(d, 3 * d), nn.Linear(d, 33)
        self.register_buffer("inv_freq", 10000 ** -(torch.arange(0, d, 2) / d))

    def rotate(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).to(torch.bfloat16)
        angles = positions[:, None] * self.inv_freq
        (even, odd), cos, sin = x.chunk(2, -1), angles.cos(), angles.sin()
        return torch.cat([even * cos - odd * sin, even * sin + odd * cos], -1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head(x + F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True))


@fault("M15", "precision.positions_low_precision", delay="B")
def rotary_in_bf16(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    ids = sequences(seed, n=96, length=384)
    train(watch, Rotary(), loader(ids, ids, seed, batch=4), predict_next, lr=3e-3, epochs=1)


def contrast(model: nn.Module, pairs: Tensor, alike: Tensor) -> Tensor:
    distance = (model(pairs[:, 0]) - model(pairs[:, 1])).pow(2).sum(1).sqrt()
    return (alike * distance.pow(2) + (1 - alike) * F.relu(1 - distance).pow(2)).mean()


@fault("M16", "gradient.infinite_derivative", delay="N", active=9)
def distance_of_equals(watch: Watch, seed: int) -> Mapping[str, Any]:
    """In one pair both samples are equal: the loss is finite, but sqrt has no derivative at 0: the gradient is NaN."""
    torch.manual_seed(seed)
    pairs = torch.randn(1024, 2, 20)
    alike = torch.randint(2, (1024,)).float()
    pairs[:, 1] = torch.where(alike[:, None] == 1, pairs[:, 0] + 0.3 * pairs[:, 1], pairs[:, 1])
    twin = drawn_in(9, loader(pairs, alike, seed, batch=32), seed)
    pairs[twin, 1], alike[twin] = pairs[twin, 0], 1.0
    train(watch, mlp(classes=8), loader(pairs, alike, seed, batch=32), contrast, epochs=1)
    return {"sample_ids": [twin], "op": "sqrt", "module": None, "dtype": "float32"}


def poisson(model: nn.Module, x: Tensor, count: Tensor) -> Tensor:
    """Poisson loss; feature 0 is the exposure. ``where`` keeps log(0) out of the loss, but not out of its gradient."""
    rate = x[:, 0] * F.softplus(model(x[:, 1:]).squeeze(1))
    return (rate - torch.where(rate > 0, count * rate.log(), 0.0)).mean()


@fault("M17", "gradient.where_hides_nan", delay="N", active=7)
def log_behind_where(watch: Watch, seed: int) -> Mapping[str, Any]:
    torch.manual_seed(seed)
    x = torch.randn(1024, 21)
    x[:, 0] = x[:, 0].abs() + 0.1
    count = torch.poisson(x[:, 0] * (0.5 * x[:, 1]).exp())
    unexposed = drawn_in(7, loader(x, count, seed, batch=32), seed)
    x[unexposed, 0], count[unexposed] = 0.0, 0.0
    train(watch, mlp(classes=1), loader(x, count, seed, batch=32), poisson, epochs=1)
    return {"sample_ids": [unexposed], "op": "log", "module": None, "dtype": "float32"}


class Latent(nn.Module):
    """Gaussian latents whose log-variance is scaled by 30 before ``exp``."""

    def __init__(self, width: int, latents: int) -> None:
        super().__init__()
        self.mean, self.logvar = nn.Linear(width, latents), nn.Linear(width, latents)
        nn.init.kaiming_normal_(self.logvar.weight)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        mean, logvar = self.mean(h), 30 * self.logvar(h)
        kl = 0.5 * (mean.pow(2) + logvar.exp() - logvar - 1).sum(1).mean()
        return mean + (0.5 * logvar).exp() * torch.randn_like(mean), kl


class VAE(nn.Module):
    def __init__(self, pixels: int = 64, width: int = 64, latents: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(pixels, width), nn.ReLU(), nn.LayerNorm(width))
        self.latent = Latent(width, latents)
        self.decoder = nn.Sequential(nn.Linear(latents, width), nn.ReLU(), nn.Linear(width, pixels))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z, kl = self.latent(self.encoder(x))
        return self.decoder(z), kl


def elbo(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    decoded, kl = model(x)
    return F.mse_loss(decoded, x.flatten(1)) + kl


@fault("M18", "precision.overflow", delay="N")
def variance_overflows(watch: Watch, seed: int) -> Mapping[str, Any]:
    torch.manual_seed(seed)
    train(watch, VAE(), loader(*images(seed), seed), elbo)
    return {"op": "exp", "module": "latent", "dtype": "float32"}


class Sparse(nn.Module):
    # Modifies ``code`` through .data after the head has used it; the backward pass needs the original values.
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.head = nn.Linear(20, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        code = self.encode(x).sigmoid()
        out = self.head(code)
        code.data.mul_(code.data > 0.6)
        return out


@fault("M19", "gradient.saved_tensor_modified", delay="S")
def data_edited(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    train(watch, Sparse(), loader(*table(seed), seed))


class Checkpointed(nn.Module):
    """Runs ``body`` with activation checkpointing; ``how``: arguments of ``checkpoint``."""

    def __init__(self, stem: nn.Module, body: nn.Module, head: nn.Module, **how: Any) -> None:
        super().__init__()
        self.stem, self.body, self.head, self.how = stem, body, head, how

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, self.stem(x), use_reentrant=False, **self.how))


@fault("M20", "gradient.recompute_mismatch", delay="S")
def checkpoint_without_rng(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.3))
    model = Checkpointed(nn.Linear(20, 64), body, nn.Linear(64, 10), preserve_rng_state=False)
    train(watch, model, loader(*table(seed), seed))


@fault("M21", "model.bn_double_update", delay="S")
def checkpointed_batchnorm(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    net = cnn()
    model = Checkpointed(net[:3], net[3:6], net[6:])
    train(watch, model, loader(*images(seed), seed, batch=32), lr=3e-3, epochs=2)


@fault("M22", "optim.nothing_trainable", delay="S")
def all_frozen_but_batchnorm(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = cnn()
    for module in model:
        module.requires_grad_(isinstance(module, nn.BatchNorm2d))
    train(watch, model, loader(*images(seed), seed, batch=32), epochs=2)


class Routed(nn.Module):
    """Top-1 of ``n`` experts; the router's logits are multiplied by 5, and no loss balances their use."""

    def __init__(self, d: int = 32, n: int = 8) -> None:
        super().__init__()
        self.stem, self.router, self.head = nn.Linear(20, d), nn.Linear(d, n), nn.Linear(d, 10)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d)) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).relu()
        gate, choice = (5 * self.router(h)).softmax(-1).max(-1)
        out = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            sent = choice == i
            out[sent] = gate[sent, None] * expert(h[sent])
        return self.head(h + out)


@fault("M24", "model.router_collapse", delay="B")
def router_without_balance(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    train(watch, Routed(), loader(*table(seed), seed), lr=5e-2, epochs=4)


class Swish(torch.autograd.Function):
    """x * sigmoid(x); ``backward`` omits the derivative of the sigmoid."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.sigmoid()


class Activation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Swish.apply(x)


@fault("M25", "gradient.wrong_backward", delay="S")
def half_a_derivative(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 64), Activation(), nn.Linear(64, 64), Activation(), nn.Linear(64, 10))
    train(watch, model, loader(*table(seed), seed))
