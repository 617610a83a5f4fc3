"""The trainings of ``examples/`` as plain PyTorch loops. Each example must give the same weights, bit for bit.

The loops use the model, the data and the loss formula of the examples. From Trainwright they use only the order of the
samples in an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.data.sample_order import epoch_order

SEED = 1337  # default seed of the sample order


def batches(data: Sequence[Tensor], size: int, steps: int) -> Iterator[tuple[Tensor, ...]]:
    """Yields ``steps`` batches of ``size`` samples. Each epoch has its own order."""
    orders = (torch.from_numpy(epoch_order(len(data[0]), seed=SEED, epoch=epoch)) for epoch in count())
    rows = (part for order in orders for part in order.split(size))
    for part in islice(rows, steps):
        yield tuple(tensor[part] for tensor in data)


def adamw(model: nn.Module, lr: float) -> Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr, fused=True)


def follow_cosine(optimizer: Optimizer, lr: float, step: int, steps: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * (0.5 * (1 + math.cos(math.pi * step / steps)))


def minimized(
    model: nn.Module,
    data: Sequence[Tensor],
    loss: Callable[..., Any],
    steps: int,
    *,
    lr: float,
    batch: int,
    parts: int = 1,
) -> nn.Module:
    """Trains with AdamW, a cosine schedule, clipping, and the weighted mean over ``parts`` micro-batches."""
    optimizer = adamw(model, lr)
    for step, whole in enumerate(batches(data, batch, steps)):
        follow_cosine(optimizer, lr, step, steps)
        optimizer.zero_grad()
        outputs = []
        for micro in zip(*(tensor.split(batch // parts) for tensor in whole), strict=True):
            outputs.append(loss(model, micro))
            weights = [float(output.weight) for output in outputs]
            (outputs[-1].total / (weights[0] * parts)).backward()
        if parts > 1:
            for parameter in model.parameters():
                parameter.grad.mul_(weights[0] * parts / sum(weights))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def autoencoder(example: ModuleType, steps: int) -> nn.Module:
    torch.manual_seed(0)
    return minimized(example.Autoencoder(), [example.digits()], example.loss, steps, lr=3e-3, batch=64)


def gradient_penalty(example: ModuleType, steps: int) -> nn.Module:
    data = example.clouds()
    critic = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 1, bias=False))
    return minimized(critic, data, example.loss, steps, lr=5e-3, batch=64)


def reinforce(example: ModuleType, steps: int) -> nn.Module:
    torch.manual_seed(0)
    return minimized(example.policy(), [torch.arange(4096)], example.loss, steps, lr=1e-2, batch=64)


def distillation(example: ModuleType, steps: int) -> nn.Module:
    torch.manual_seed(0)
    teacher, student = example.net(256), example.net(16)
    return minimized(student, example.digits(), example.Distillation(teacher), steps, lr=3e-3, batch=64)


def dpo(example: ModuleType, steps: int) -> nn.Module:
    data = example.preferences()
    model = example.gpt(vocab_size=12, block_size=8, layers=1, heads=2, d_model=16)
    return minimized(model, data, example.Preference(model), steps, lr=3e-3, batch=32)


def masked(example: ModuleType, steps: int) -> nn.Module:
    data = example.sequences()
    return minimized(example.Encoder(), [data], example.loss, steps, lr=3e-3, batch=32, parts=2)


def seq2seq(example: ModuleType, steps: int) -> nn.Module:
    data = example.reversals()
    return minimized(example.Translator(), data, example.loss, steps, lr=5e-3, batch=32, parts=2)


def diffusion(example: ModuleType, steps: int) -> nn.Module:
    torch.manual_seed(0)
    return minimized(example.Denoiser(), [example.digits()], example.loss, steps, lr=3e-3, batch=128)


def gan(example: ModuleType, steps: int) -> nn.Module:
    points, model = example.ring(), example.Gan()
    generator, critic = model.generator, model.critic
    for_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    for_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    for (real,) in batches([points], 64, steps):
        fake = generator(torch.randn(64, 4))
        for_critic.zero_grad()
        (F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()).backward()
        for_critic.step()
        for_generator.zero_grad()
        F.softplus(-critic(fake)).mean().backward()
        for_generator.step()
    return model


def contrastive(example: ModuleType, steps: int) -> nn.Module:
    data = example.pairs()
    encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = adamw(encoder, 3e-3)
    for step, (one, other) in enumerate(batches(data, 64, steps)):
        follow_cosine(optimizer, 3e-3, step, steps)
        optimizer.zero_grad()
        with torch.no_grad():
            left = torch.cat([encoder(part) for part in one.split(16)])
            right = torch.cat([encoder(part) for part in other.split(16)])
        left.requires_grad_()
        right.requires_grad_()
        example.info_nce(left, right).backward()
        for start in range(0, 64, 16):
            rows = slice(start, start + 16)
            torch.autograd.backward([encoder(one[rows]), encoder(other[rows])], [left.grad[rows], right.grad[rows]])
        optimizer.step()
    return encoder


def ppo(example: ModuleType, steps: int) -> nn.Module:
    torch.manual_seed(0)
    agent = example.Agent()
    optimizer = adamw(agent, 5e-3)
    for step, (seeds,) in enumerate(batches([torch.arange(4096)], 64, steps)):
        follow_cosine(optimizer, 5e-3, step, steps)
        seen, actions, returns = (each.flatten(0, 1) for each in example.play(agent.policy, seeds))
        with torch.no_grad():
            before = torch.distributions.Categorical(logits=agent.policy(seen)).log_prob(actions)
        for _ in range(3):
            for rows in torch.randperm(512).chunk(4):
                optimizer.zero_grad()
                example.ppo_loss(agent, seen[rows], actions[rows], returns[rows], before[rows]).backward()
                optimizer.step()
    return agent


def cartpole(example: ModuleType, steps: int) -> nn.Module:
    torch.manual_seed(0)
    agent, ppo = example.actor_critic(observations=4, actions=2), example.PPO("CartPole-v1")
    optimizer = adamw(agent, 1e-3)
    for step, (seeds,) in enumerate(batches([torch.arange(4096)], 8, steps)):
        follow_cosine(optimizer, 1e-3, step, steps)
        rollout = ppo.rollout(agent, ppo.player.play(agent, seeds))
        for _ in range(10):
            for rows in torch.randperm(len(rollout.actions)).split(256):
                optimizer.zero_grad()
                ppo.loss(agent, rollout.minibatch(rows)).backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 10.0)
                optimizer.step()
    return agent


def lbfgs(example: ModuleType, steps: int) -> nn.Module:
    x, y = example.curve()
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5)
    for inputs, target in batches([x, y], 64, steps):

        def closure(inputs: Tensor = inputs, target: Tensor = target) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), target)
            loss.backward()
            return loss

        optimizer.step(closure)
    return model


def sam(example: ModuleType, steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = example.net(32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    for step, (image, label) in enumerate(batches(example.digits(), 64, steps)):
        follow_cosine(optimizer, 0.05, step, steps)
        optimizer.zero_grad()
        F.cross_entropy(model(image), label).backward()
        scale = 0.05 / nn.utils.get_total_norm([weight.grad for weight in model.parameters()])
        with torch.no_grad():
            here = [weight.clone() for weight in model.parameters()]
            for weight in model.parameters():
                weight += weight.grad * scale
        optimizer.zero_grad()
        F.cross_entropy(model(image), label).backward()
        with torch.no_grad():
            for weight, before in zip(model.parameters(), here, strict=True):
                weight.copy_(before)
        optimizer.step()
    return model


def manual(example: ModuleType, steps: int) -> nn.Module:
    data, model = example.waves(), example.Recurrent()
    optimizer = adamw(model, 5e-3)
    for step, (wave,) in enumerate(batches([data], 32, steps)):
        follow_cosine(optimizer, 5e-3, step, steps)
        memory = None
        for start in range(0, 40, 10):
            guess, memory = model(wave[:, start : start + 10], memory)
            memory = memory.detach()
            optimizer.zero_grad()
            F.mse_loss(guess, wave[:, start + 1 : start + 11]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return model


def ema_teacher(example: ModuleType, steps: int) -> nn.Module:
    data, model = example.pairs(), example.Byol()
    optimizer = adamw(model, 3e-3)
    for step, (one, other) in enumerate(batches(data, 64, steps)):
        follow_cosine(optimizer, 3e-3, step, steps)
        optimizer.zero_grad()
        example.byol_loss(model, one, other).backward()
        optimizer.step()
        with torch.no_grad():
            for average, weight in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                average.lerp_(weight, 0.01)
    return model


def curriculum(example: ModuleType, steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = example.gpt(vocab_size=12, block_size=16, layers=1, heads=2, d_model=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        start = torch.randint(12, (16, 1), generator=torch.Generator().manual_seed(step))
        ids = (start + torch.arange(min(4 + step // 5, 16) + 1)) % 12
        optimizer.zero_grad()
        total = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        (total / ids[:, 1:].numel()).backward()
        optimizer.step()
    return model


def multitask(example: ModuleType, steps: int) -> nn.Module:
    data = example.tasks()
    model = example.Multitask()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        task = ("parity", "sum")[int(torch.multinomial(torch.tensor([512.0, 128.0]).sqrt(), 1, generator=generator))]
        x, label = data[task]
        rows = torch.randint(len(x), (32,), generator=generator)
        optimizer.zero_grad()
        (F.cross_entropy(model(task, x[rows]), label[rows], reduction="sum") / 32).backward()
        optimizer.step()
    return model
