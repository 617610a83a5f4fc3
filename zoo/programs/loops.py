"""Legal techniques in the loop: optimizers of all kinds, schedules, averages, precision, who calls what and when."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    OneCycleLR,
)
from torch.optim.swa_utils import AveragedModel

from zoo.programs.training import Batch, Training


def accumulated(t: Training) -> None:
    """Four micro-batches a step."""
    t.accumulation, t.batch_size, t.epochs = 4, 8, 5

    def update(training: Training, batch: Batch) -> Tensor:
        loss = training.loss(training.model, batch) / 4
        loss.backward()
        if training.steps % 4 == 3:
            training.optimizers[0].step()
            training.optimizers[0].zero_grad()
        return 4 * loss.detach()

    t.update = update


def several_groups(t: Training) -> None:
    """Matrices decay and learn slower, vectors do neither."""

    def groups(training: Training) -> list[torch.optim.Optimizer]:
        flat = [p for p in training.parameters() if p.dim() < 2]
        deep = [p for p in training.parameters() if p.dim() > 1]
        return [
            AdamW([{"params": deep, "weight_decay": 0.1, "lr": t.lr / 2}, {"params": flat, "weight_decay": 0.0}], t.lr)
        ]

    t.optimizers_of = groups


def warm_restarts(t: Training) -> None:
    t.scheduler_of = lambda optimizer: CosineAnnealingWarmRestarts(optimizer, T_0=20, T_mult=2)


def warmed_up(t: Training) -> None:
    """From a rate of zero."""
    t.scheduler_of = lambda optimizer: LambdaLR(optimizer, lambda step: min(step / 15, 1.0))


def one_cycle(t: Training) -> None:
    steps = t.epochs * (len(t.data) // t.batch_size)
    t.scheduler_of = lambda optimizer: OneCycleLR(optimizer, max_lr=3 * t.lr, total_steps=steps + 1)


def cosine(t: Training) -> None:
    steps = t.epochs * (len(t.data) // t.batch_size)
    t.scheduler_of = lambda optimizer: CosineAnnealingLR(optimizer, T_max=steps)


def decayed(t: Training) -> None:
    t.scheduler_of = lambda optimizer: ExponentialLR(optimizer, 0.98)


def momentum(t: Training) -> None:
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.05, momentum=0.9, nesterov=True)]


def root_mean_square(t: Training) -> None:
    t.optimizers_of = lambda training: [RMSprop(training.parameters(), lr=1e-3)]


def adagrad(t: Training) -> None:
    t.optimizers_of = lambda training: [Adagrad(training.parameters(), lr=0.03)]


def amsgrad(t: Training) -> None:
    t.optimizers_of = lambda training: [Adam(training.parameters(), lr=t.lr, amsgrad=True)]


def two_optimizers(t: Training) -> None:
    """One for the matrices, another for the rest."""

    def both(training: Training) -> list[torch.optim.Optimizer]:
        flat = [p for p in training.parameters() if p.dim() < 2]
        deep = [p for p in training.parameters() if p.dim() > 1]
        return [SGD(deep, lr=0.05, momentum=0.9), Adam(flat, lr=t.lr)]

    def update(training: Training, batch: Batch) -> Tensor:
        for each in training.optimizers:
            each.zero_grad()
        loss = training.loss(training.model, batch)
        loss.backward()
        for each in training.optimizers:
            each.step()
        return loss.detach()

    t.optimizers_of, t.update = both, update


def clipped(t: Training) -> None:
    _before_update(t, lambda: nn.utils.clip_grad_norm_(t.parameters(), 1.0))


def clipped_by_value(t: Training) -> None:
    _before_update(t, lambda: nn.utils.clip_grad_value_(t.parameters(), 0.5))


@torch.no_grad()
def _add_noise(t: Training) -> None:
    for p in t.parameters():
        if p.grad is not None:
            p.grad.add_(0.01 * p.grad.std(correction=0) * torch.randn_like(p.grad))


def gradient_noise(t: Training) -> None:
    _before_update(t, lambda: _add_noise(t))


@torch.no_grad()
def _centre(t: Training) -> None:
    for p in t.parameters():
        if p.grad is not None and p.dim() > 1:
            p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.dim())), keepdim=True))


def centred_gradients(t: Training) -> None:
    _before_update(t, lambda: _centre(t))


def _before_update(t: Training, change) -> None:
    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,) = training.optimizers
        loss = training.loss(training.model, batch)
        optimizer.zero_grad()
        loss.backward()
        change()
        optimizer.step()
        return loss.detach()

    t.update = update


def averaged_weights(t: Training) -> None:
    """SWA from half-way on."""
    average = AveragedModel(t.model)
    t.each_epoch.append(lambda training, epoch: average.update_parameters(training.model) if epoch > 1 else None)


def moving_average(t: Training) -> None:
    average = copy.deepcopy(t.model).requires_grad_(False)

    @torch.no_grad()
    def follow(training: Training) -> None:
        for kept, new in zip(average.state_dict().values(), training.model.state_dict().values()):
            kept.copy_(0.95 * kept + 0.05 * new if kept.is_floating_point() else new)

    t.each_step.append(follow)


def lookahead(t: Training) -> None:
    """Every five steps half-way back to where one was."""
    slow = [p.detach().clone() for p in t.parameters()]

    @torch.no_grad()
    def back(training: Training) -> None:
        if training.steps % 5 == 0:
            for kept, p in zip(slow, training.parameters()):
                kept.lerp_(p, 0.5)
                p.copy_(kept)

    t.each_step.append(back)


def lbfgs(t: Training) -> None:
    t.batch_size, t.epochs = 256, 4
    t.optimizers_of = lambda training: [LBFGS(training.parameters(), lr=0.3, max_iter=4, history_size=5)]

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,) = training.optimizers

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = training.loss(training.model, batch)
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    t.update = update


def closure(t: Training) -> None:
    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,) = training.optimizers

        def evaluate() -> Tensor:
            optimizer.zero_grad()
            loss = training.loss(training.model, batch)
            loss.backward()
            return loss

        return optimizer.step(evaluate).detach()

    t.update = update


def sharpness_aware(t: Training) -> None:
    """The gradient of where the loss is worst nearby."""

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,) = training.optimizers
        parameters = training.parameters()
        loss = training.loss(training.model, batch)
        optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm() + 1e-12
            steps = [0.05 * p.grad / norm if p.grad is not None else torch.zeros_like(p) for p in parameters]
            for p, step in zip(parameters, steps):
                p.add_(step)
        optimizer.zero_grad()
        training.loss(training.model, batch).backward()
        with torch.no_grad():
            for p, step in zip(parameters, steps):
                p.sub_(step)
        optimizer.step()
        return loss.detach()

    t.update = update


def by_hand(t: Training) -> None:
    """Some weights are moved by hand, the others by the optimizer."""
    hand = [p for p in t.parameters() if p.dim() < 2]
    rest = [p for p in t.parameters() if p.dim() > 1]
    t.optimizers_of = lambda training: [Adam(rest, lr=t.lr)]

    def update(training: Training, batch: Batch) -> Tensor:
        loss = training.loss(training.model, batch)
        training.model.zero_grad()
        loss.backward()
        training.optimizers[0].step()
        with torch.no_grad():
            for p in hand:
                p -= 0.02 * p.grad
        return loss.detach()

    t.update = update


def stepped_without_grad(t: Training) -> None:
    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,) = training.optimizers
        loss = training.loss(training.model, batch)
        loss.backward()
        with torch.no_grad():
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    t.update = update


def functional_gradient(t: Training) -> None:
    """``torch.autograd.grad`` in place of ``backward``."""

    def update(training: Training, batch: Batch) -> Tensor:
        loss = training.loss(training.model, batch)
        for p, gradient in zip(training.parameters(), torch.autograd.grad(loss, training.parameters())):
            p.grad = gradient
        training.optimizers[0].step()
        return loss.detach()

    t.update = update


def bfloat16(t: Training) -> None:
    plain = t.loss

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return plain(model, batch)

    t.loss = loss


def float16_scaled(t: Training) -> None:
    plain, t.scaler = t.loss, torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler = t.scaler

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,) = training.optimizers
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = plain(training.model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    t.update = update


def gradient_penalty(t: Training) -> None:
    """A gradient of a gradient."""
    plain = t.loss

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch[0].clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return plain(model, batch) + 1e-3 * slope.square().flatten(1).sum(1).mean()

    t.loss = loss


def adversarial(t: Training) -> None:
    """Half of the loss is on inputs that were moved to where it is worse."""
    plain = t.loss

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch[0].clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(plain(model, (x, batch[1])), x)
        moved = (x + 0.05 * slope.sign()).detach()
        return 0.5 * plain(model, batch) + 0.5 * plain(model, (moved, batch[1]))

    t.loss = loss


def evaluated(t: Training) -> None:
    """An evaluation after each epoch, and the best weights put back at the end."""
    x, y = t.data.tensors
    held_out = (x[-128:], y[-128:])
    t.data.tensors = (x[:-128], y[:-128])
    best: dict[str, Tensor] = {}
    lowest = float("inf")

    def look(training: Training, epoch: int) -> None:
        nonlocal lowest, best
        training.model.eval()
        with torch.no_grad():
            loss = float(training.loss(training.model, held_out))
        if loss < lowest:
            lowest, best = loss, copy.deepcopy(training.model.state_dict())
        training.model.train()

    t.each_epoch.append(look)


def truncated(t: Training) -> None:
    """Backpropagation through time, cut in the middle of each series."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        first, state = model.cell(x[:, :8])
        second, _ = model.cell(x[:, 8:], state.detach())
        logits = model.head(model.norm(torch.cat([first.detach(), second], 1).mean(1)))
        return F.cross_entropy(logits, y)

    t.loss = loss
