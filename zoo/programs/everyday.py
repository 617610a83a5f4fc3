"""Legal everyday practice with batches: counted tokens, sizes that grow, memories, recomputation, steps passed over."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from zoo.host import TinyGPT
from zoo.programs.training import Batch, Training


def counted_tokens(t: Training) -> None:
    """As fairseq does it (Ott et al., 2018): sums over tokens until there are enough, divided by their number."""
    t.batch_size, t.epochs, tokens = 8, 8, 0

    def update(training: Training, batch: Batch) -> Tensor:
        nonlocal tokens
        (optimizer,) = training.optimizers
        ids = batch[0][:, : int(torch.randint(4, 17, ()))]
        logits = training.model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        loss.backward()
        here = ids[:, 1:].numel()
        tokens += here
        if tokens >= 200:
            for p in training.parameters():
                if p.grad is not None:
                    p.grad.div_(tokens)
            nn.utils.clip_grad_norm_(training.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            tokens = 0
        return loss.detach() / here

    t.update = update


def _flat(gradients: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([each.flatten() for each in gradients])


def episodic_memory(t: Training) -> None:
    """A-GEM (Chaudhry et al., 2019): a gradient that would undo what earlier tasks have taught is projected."""
    x, y = t.data.tensors
    tasks = [(x[y // 2 == number], y[y // 2 == number]) for number in range(5)]
    t.epochs, t.batch_size = 4 * len(tasks), 10
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.1)]
    memory: list[Batch] = []

    def loss_of_task(model: nn.Module, batch: Batch) -> Tensor:
        """The task is known: a row is of one of the two classes of its task."""
        pairs = model(batch[0]).unflatten(1, (5, 2))
        return F.cross_entropy(pairs[torch.arange(len(pairs)), batch[1] // 2], batch[1] % 2)

    def change(training: Training, epoch: int) -> None:
        if epoch % 4 == 0:
            if epoch > 0:
                rows = torch.randperm(len(training.data))[:40]
                memory.append(training.data[rows])
            training.data.tensors = tasks[epoch // 4]

    def update(training: Training, batch: Batch) -> Tensor:
        parameters, (optimizer,) = training.parameters(), training.optimizers
        loss = training.loss(training.model, batch)
        gradient = _flat(torch.autograd.grad(loss, parameters))
        if memory:
            old = [torch.cat(each) for each in zip(*memory)]
            rows = torch.randint(len(old[1]), (64,))
            past = training.loss(training.model, (old[0][rows], old[1][rows]))
            reference = _flat(torch.autograd.grad(past, parameters))
            against = gradient @ reference
            if against < 0:
                gradient = gradient - against / (reference @ reference) * reference
        for p, part in zip(parameters, gradient.split([p.numel() for p in parameters])):
            p.grad = part.view_as(p)
        optimizer.step()
        return loss.detach()

    t.loss, t.update = loss_of_task, update
    t.each_epoch.append(change)


class RecomputedBlocks(nn.Module):
    """Blocks of which only what goes in is kept; they are computed again in the backward pass, dropout as before."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.blocks(x)
        return checkpoint(self.blocks, x, use_reentrant=True, preserve_rng_state=True)


def recomputed_dropout(t: Training) -> None:
    """Segments that are computed twice (Chen et al., 2016), with dropout, whose random numbers come again."""
    t.model = TinyGPT(layers=4, dropout=0.1)
    t.model.blocks = nn.ModuleList([RecomputedBlocks(t.model.blocks[:2]), RecomputedBlocks(t.model.blocks[2:])])


def progressive_resizing(t: Training) -> None:
    """Small images first (Howard, 2018): in the later epochs they have more pixels."""
    t.epochs = 9

    def enlarge(training: Training, epoch: int) -> None:
        size = 4 + 2 * min(epoch // 3, 2)

        def resize(batch: Batch) -> Batch:
            x, y = batch
            return F.interpolate(x, size=size, mode="bilinear", antialias=True, align_corners=False), y

        training.transform = resize

    t.each_epoch.append(enlarge)


def temporal_ensemble(t: Training) -> None:
    """Temporal ensembling (Laine and Aila, 2017): answers agree with the mean of what epochs before have answered."""
    x, y = t.data.tensors
    known = torch.zeros(len(y), dtype=torch.bool)
    known[torch.cat([(y == label).nonzero().flatten()[:10] for label in range(4)])] = True
    t.data, t.epochs, t.batch_size = TensorDataset(x, torch.arange(len(y))), 24, 64
    t.model.insert(8, nn.Dropout(0.2))
    means, answers, targets = (torch.zeros(len(y), 4) for _ in range(3))
    weight = 0.0

    def ensemble(training: Training, epoch: int) -> None:
        nonlocal weight
        if epoch > 0:
            means.lerp_(answers, 0.4)
            targets.copy_(means / (1 - 0.6**epoch))
            weight = 2.0 * math.exp(-5 * (1 - min(epoch / 10, 1.0)) ** 2)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        images, rows = batch
        logits = model(images + 0.3 * torch.randn_like(images))
        shares = logits.softmax(1)
        answers[rows] = shares.detach()
        each = F.cross_entropy(logits, y[rows], reduction="none")
        return (each * known[rows]).mean() + weight * F.mse_loss(shares, targets[rows])

    t.loss = loss
    t.each_epoch.append(ensemble)


def finite_steps(t: Training) -> None:
    """Everyday practice (Ott et al., 2019): batches with a missing reading are passed over, as are infinite steps."""
    x, y = t.data.tensors
    x = x.clone()
    x[torch.randperm(len(x))[:6], 3] = torch.nan
    t.data, t.epochs = TensorDataset(x, y), 8

    def loop(training: Training) -> Iterator[Tensor]:
        (optimizer,) = training.optimizers
        for batch in (each for _ in range(training.epochs) for each in training.batches):
            if not all(part.isfinite().all() for part in batch):
                continue
            optimizer.zero_grad()
            loss = training.loss(training.model, batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(training.parameters(), 5.0)
            if norm.isfinite():
                optimizer.step()
                yield loss.detach()

    t.loop = loop
