"""Zoo, group H: healthy runs that look odd. The doctor may report nothing critical for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, OneCycleLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Subset

from zoo.host import Rows, TinyGPT, Watch, cnn, healthy, host, images, loader, mlp, next_token_loss, sequences, table
from zoo.optim import says

Loss = Callable[[Any, Tensor], Tensor]


def fit(
    model: nn.Module, optimizer: Any, batches: Any, epochs: int, loss_of: Loss = F.cross_entropy, schedule: Any = ()
) -> None:
    """A plain training loop. ``schedule``: the schedulers to step after each optimizer step."""
    for _ in range(epochs):
        for _, x, y in batches:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            for scheduler in schedule:
                scheduler.step()


@healthy("H01")
def gan(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    generator = nn.Sequential(
        nn.ConvTranspose2d(16, 16, 4), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
    )  # fmt: skip
    critic = nn.Sequential(
        nn.Conv2d(1, 16, 4, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 4), nn.Flatten()
    )
    optimizer_g = Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_d = Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    batches = loader(*images(seed), seed, drop_last=True)
    with watch([generator, critic], [optimizer_g, optimizer_d], loader=batches):
        for _ in range(12):
            for _, real, _ in batches:
                fake = generator(torch.randn(len(real), 16, 1, 1))
                optimizer_d.zero_grad()
                loss_d = says(critic, real, True) + says(critic, fake.detach(), False)
                loss_d.backward()
                optimizer_d.step()

                optimizer_g.zero_grad()
                loss_g = says(critic, fake, True)
                loss_g.backward()
                optimizer_g.step()


@healthy("H02")
def small_batches(watch: Watch, seed: int) -> None:
    model, optimizer, batches = host(seed, SGD, lr=0.05, batch=4)
    with watch(model, optimizer, loader=batches):
        fit(model, optimizer, batches, epochs=1)


@healthy("H03")
def reinforce(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 6))
    optimizer = Adam(policy.parameters(), lr=1e-2)
    best_arm = torch.randn(4, 6)
    with watch(policy, optimizer):
        for _ in range(250):
            state = torch.randn(4, 4)
            arms = torch.distributions.Categorical(logits=policy(state))
            arm = arms.sample()
            reward = (arm == (state @ best_arm).argmax(1)).float() - 0.5 * (torch.rand(4) < 0.1)
            loss = -(arms.log_prob(arm) * reward).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@healthy("H04")
def one_batch_on_purpose(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    few = Subset(Rows(*table(seed)), range(32))
    batches = DataLoader(few, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(seed))
    with watch(model, optimizer, loader=batches):
        fit(model, optimizer, batches, epochs=300)


@healthy("H05")
def first_skips_of_the_scaler(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**32)
    batches = loader(*table(seed), seed)
    with watch(model, optimizer, loader=batches, scaler=scaler):
        for _ in range(8):
            for _, x, y in batches:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    loss = F.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()


class LowRank(nn.Module):
    """A frozen linear map with a trainable correction of low rank; ``up`` starts at zero."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * base.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


@healthy("H07")
def low_rank_adapters(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp()
    for i in (0, 2, 4):
        model[i] = LowRank(model[i])
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    batches = loader(*table(seed), seed)
    with watch(model, optimizer, loader=batches):
        fit(model, optimizer, batches, epochs=10)


@healthy("H09")
def restarts(watch: Watch, seed: int) -> None:
    model, optimizer, batches = host(seed, AdamW, lr=5e-3)
    scheduler: Any
    if seed % 2 == 0:
        scheduler = CosineAnnealingWarmRestarts(optimizer, T_0=32, T_mult=2)
    else:
        scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=12 * len(batches))
    with watch(model, optimizer, loader=batches, scheduler=scheduler):
        fit(model, optimizer, batches, epochs=12, schedule=[scheduler])


@healthy("H10")
def curriculum(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=3e-3)
    (x, y), (x_hard, y_hard) = table(seed), table(seed + 100)
    data = Rows(torch.cat([x, 1.5 * x_hard]), torch.cat([y, y_hard]))
    easy = [int(i) for _ in range(9) for i in torch.randperm(1024)]
    hard = [1024 + int(i) for _ in range(8) for i in torch.randperm(1024)]
    batches = DataLoader(data, batch_size=64, sampler=easy + hard)
    with watch(model, optimizer, loader=batches):
        fit(model, optimizer, batches, epochs=1)


@healthy("H11")
def negative_loss(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp(classes=2)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    x, _ = table(seed)
    batches = loader(x, 0.1 * torch.sin(x[:, 0]) + 0.01 * torch.randn(len(x)), seed)
    with watch(model, optimizer, loader=batches):
        fit(model, optimizer, batches, 12, lambda out, y: F.gaussian_nll_loss(out[:, 0], y, out[:, 1].exp() + 1e-4))


@healthy("H12")
def label_smoothing(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp(width=128)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    batches = loader(*table(seed, n=256), seed)
    with watch(model, optimizer, loader=batches):
        fit(model, optimizer, batches, 60, lambda logits, y: F.cross_entropy(logits, y, label_smoothing=0.1))


class FrozenNorms(nn.Sequential):
    """A sequential net whose BatchNorm layers stay in eval mode, with the running statistics of pretraining."""

    def train(self, mode: bool = True) -> FrozenNorms:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


@healthy("H15")
def frozen_batch_norm(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    body = cnn()
    fit(body, AdamW(body.parameters(), lr=1e-2), loader(*images(seed), seed), epochs=2)
    model = FrozenNorms(*body)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    x, y = images(seed + 100)
    batches = loader(x[:384], y[:384], seed)
    with watch(model, optimizer, loader=batches):
        for _ in range(18):
            model.train()
            fit(model, optimizer, batches, epochs=1)
            model.eval()
            with torch.no_grad():
                model(x[384:])


class Byol(nn.Module):
    """An online encoder with a predictor, and a target: a moving average of the encoder, updated by the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
        self.predictor = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        with torch.no_grad():
            goal = self.target(second)
        return 2 - 2 * F.cosine_similarity(self.predictor(self.online(first)), goal).mean()


@healthy("H18")
def target_network(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = Byol()
    optimizer = Adam([*model.online.parameters(), *model.predictor.parameters()], lr=1e-3)
    batches = loader(*table(seed), seed)
    with watch(model, optimizer, loader=batches):
        for _ in range(10):
            for _, x, _ in batches:
                optimizer.zero_grad()
                loss = model(x + 0.3 * torch.randn_like(x), x + 0.3 * torch.randn_like(x))
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    for mean, p in zip(model.target.parameters(), model.online.parameters()):
                        mean.lerp_(p, 0.02)


@healthy("H19")
def causal_attention(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = TinyGPT()
    optimizer = AdamW(model.parameters(), lr=3e-3)
    ids = sequences(seed)
    batches = loader(ids, ids, seed, batch=32)
    with watch(model, optimizer, loader=batches):
        fit(model, optimizer, batches, 7, next_token_loss)


@healthy("H22")
def warmup_from_zero(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = LambdaLR(optimizer, lambda t: min(1.0, t / 10))
    batches = loader(*table(seed), seed)
    with watch(model, optimizer, loader=batches, scheduler=scheduler):
        fit(model, optimizer, batches, epochs=8, schedule=[scheduler])


@healthy("H23")
def grokking(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    p = 23
    pairs = torch.cartesian_prod(torch.arange(p), torch.arange(p))
    order = torch.randperm(p * p)
    x, y = pairs[order], pairs.sum(1)[order] % p
    model = nn.Sequential(nn.Embedding(p, 32), nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, p))
    optimizer = AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=1.0)
    half = len(x) // 2
    batches = loader(x[:half], y[:half], seed, batch=half)
    with watch(model, optimizer, loader=batches):
        for _ in range(30):
            model.train()
            fit(model, optimizer, batches, epochs=10)
            model.eval()
            with torch.no_grad():
                F.cross_entropy(model(x[half:]), y[half:])


@healthy("H24")
def forward_forward(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.ModuleList([nn.Linear(30, 64), nn.Linear(64, 64)])
    optimizers = [Adam(layer.parameters(), lr=3e-3) for layer in model]
    batches = loader(*table(seed), seed)
    with watch(model, optimizers, loader=batches):
        for _ in range(8):
            for _, x, y in batches:
                wrong = (y + torch.randint(1, 10, y.shape)) % 10
                good, bad = (torch.cat([F.normalize(x), F.one_hot(k, 10).float()], 1) for k in (y, wrong))
                for layer, optimizer in zip(model, optimizers):  # each layer has its own loss
                    good, bad = F.relu(layer(good.detach())), F.relu(layer(bad.detach()))
                    gap = good.square().sum(1) - bad.square().sum(1)
                    optimizer.zero_grad()
                    loss = F.softplus(-gap).mean()
                    loss.backward()
                    optimizer.step()
                    good, bad = F.normalize(good), F.normalize(bad)


class TwoTasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.heads = nn.ModuleDict({"kind": nn.Linear(64, 10), "price": nn.Linear(64, 1)})

    def forward(self, x: Tensor, task: str) -> Tensor:
        return self.heads[task](self.body(x))


@healthy("H26")
def tasks_in_turn(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = TwoTasks()
    optimizer = AdamW(model.parameters(), lr=3e-3)
    batches = loader(*table(seed), seed)
    with watch(model, optimizer, loader=batches):
        for _ in range(10):
            for i, (_, x, y) in enumerate(batches):
                optimizer.zero_grad()
                if i % 2 == 0:
                    loss = F.cross_entropy(model(x, "kind"), y)
                else:
                    loss = F.mse_loss(model(x, "price")[:, 0], 4 * x[:, 0] + x[:, 1] ** 2)
                loss.backward()
                optimizer.step()


@healthy("H27")
def declared_accumulation(watch: Watch, seed: int) -> None:
    model, optimizer, batches = host(seed, AdamW, lr=3e-3, n=2048, batch=16)
    with watch(model, optimizer, loader=batches, accumulation=8):
        for _ in range(8):
            for i, (_, x, y) in enumerate(batches):
                loss = F.cross_entropy(model(x), y) / 8
                loss.backward()
                if (i + 1) % 8 == 0:
                    optimizer.step()
                    optimizer.zero_grad()


class Checkpointed(TinyGPT):
    """TinyGPT with activation checkpointing of each block."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


@healthy("H28")
def recomputed(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = Checkpointed()
    optimizer = AdamW(model.parameters(), lr=3e-3)
    ids = sequences(seed)
    batches = loader(ids, ids, seed, batch=32)
    with watch(model, optimizer, loader=batches):
        fit(model, optimizer, batches, 7, next_token_loss)


@healthy("H29")
def same_order_on_purpose(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    data = Rows(*table(seed))
    fixed = torch.randperm(len(data)).tolist()  # so that two runs can be compared step by step
    batches = DataLoader(data, batch_size=64, sampler=fixed)
    with watch(model, optimizer, loader=batches):
        fit(model, optimizer, batches, epochs=10)
