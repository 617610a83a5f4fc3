"""Zoo, group O: faults of the optimizer and its learning rate."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.host import Watch, fault, host, images, loader, mlp, table, train


@fault("O01", "optim.lr_too_high", delay="D")
def lr_too_high(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp()
    if seed % 3 == 0:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3.0)
    elif seed % 3 == 1:
        optimizer = torch.optim.SGD(model.parameters(), lr=30.0)  # type: ignore[assignment]
    else:  # the loss falls for some steps before it diverges
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)  # type: ignore[assignment]
    batches = loader(*table(seed), seed)
    train(watch, model, optimizer, batches, epochs=4)


@fault("O02", "optim.lr_too_low", delay="S")
def lr_too_low(watch: Watch, seed: int) -> None:
    model, optimizer, batches = host(seed, torch.optim.AdamW, lr=1e-8)
    train(watch, model, optimizer, batches, epochs=5)


@fault("O03", "optim.params_missing", delay="S")
def params_missing(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp()
    optimizer = torch.optim.AdamW(model[4].parameters(), lr=1e-3)
    batches = loader(*table(seed), seed)
    train(watch, model, optimizer, batches, epochs=5)


@fault("O04", "optim.stale_params", delay="S")
def stale_params(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = copy.deepcopy(model)  # as some wrappers do; the optimizer holds the parameters of the original
    batches = loader(*table(seed), seed)
    train(watch, model, optimizer, batches, epochs=5)


@fault("O05", "optim.missing_zero_grad", delay="S", active=2, fixable=False)
def missing_zero_grad(watch: Watch, seed: int) -> None:
    model, optimizer, batches = host(seed, torch.optim.SGD, lr=0.1, momentum=0.9)
    with watch(model, optimizer, loader=batches):
        for _ in range(5):
            for _, x, y in batches:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()


@fault("O06", "optim.zero_grad_before_step", delay="S", fixable=False)
def zero_grad_before_step(watch: Watch, seed: int) -> None:
    model, optimizer, batches = host(seed, torch.optim.AdamW, lr=1e-3)
    with watch(model, optimizer, loader=batches):
        for _ in range(5):
            for _, x, y in batches:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.zero_grad()
                optimizer.step()


@fault("O07", "optim.step_never_called", delay="S", fixable=False)
def step_never_called(watch: Watch, seed: int) -> None:
    model, optimizer, batches = host(seed, torch.optim.AdamW, lr=1e-3)
    with watch(model, optimizer, loader=batches):
        for _ in range(5):
            for _, x, y in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()


@fault("O09", "optim.weight_decay_too_high", delay="B")
def weight_decay_too_high(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp()
    decoupled = seed % 2 == 0
    optimizer_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = optimizer_class(model.parameters(), lr=3e-3, weight_decay=10)
    batches = loader(*table(seed), seed)
    train(watch, model, optimizer, batches, epochs=12)


@fault("O10", "optim.params_in_two_optimizers", delay="S")
def double_owned(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp()
    everything = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainable = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    batches = loader(*table(seed), seed)
    with watch(model, [everything, trainable], loader=batches):
        for _ in range(5):
            for _, x, y in batches:
                everything.zero_grad()
                trainable.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                everything.step()
                trainable.step()


@fault("O11", "optim.group_lr_zero", delay="S")
def zero_lr_group(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp()
    body, head = [*model[0].parameters(), *model[2].parameters()], list(model[4].parameters())
    optimizer = torch.optim.AdamW([{"params": body}, {"params": head, "lr": 0.0}], lr=1e-3)
    batches = loader(*table(seed), seed)
    train(watch, model, optimizer, batches, epochs=5)


def players(pixels: int) -> tuple[nn.Module, nn.Module]:
    generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, pixels))
    critic = nn.Sequential(nn.Linear(pixels, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    return generator, critic


def says(critic: nn.Module, x: Tensor, real: bool) -> Tensor:
    """Loss of a critic that should classify ``x`` as real, or as fake."""
    logits = critic(x)
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


@fault("O15", "optim.missing_zero_grad", delay="S", active=2, fixable=False)
def critic_keeps_gradients(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    pictures, kinds = images(seed)
    generator, critic = players(math.prod(pictures.shape[1:]))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    batches = loader(pictures.flatten(1), kinds, seed, drop_last=True)
    with watch([generator, critic], [optimizer_g, optimizer_d], loader=batches):
        for _ in range(8):
            for _, real, _ in batches:
                fake = generator(torch.randn(len(real), 16))
                loss_d = says(critic, real, True) + says(critic, fake.detach(), False)
                loss_d.backward()
                optimizer_d.step()

                optimizer_g.zero_grad()
                loss_g = says(critic, fake, True)
                loss_g.backward()
                optimizer_g.step()
