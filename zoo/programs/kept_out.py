"""Ways to learn from labels and views that nobody may look at while laws are written: they are measured at the end."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from torch.utils.data import TensorDataset

from zoo.host import mlp
from zoo.programs.training import Batch, Training


def co_teaching(t: Training) -> None:
    """Co-teaching (Han et al., 2018): with wrong labels, each of two models learns from what the other finds easy."""
    x, y = t.data.tensors
    wrong = torch.rand(len(y)) < 0.4
    t.data = TensorDataset(x, torch.where(wrong, torch.randint(10, y.shape), y))
    other = mlp()
    t.extra.append(other)
    t.epochs, t.batch_size = 10, 64
    t.optimizers_of = lambda training: [Adam(each.parameters(), lr=t.lr) for each in (training.model, other)]

    def update(training: Training, batch: Batch) -> Tensor:
        epoch = training.steps * training.batch_size / len(training.data)
        kept = int(len(batch[0]) * (1 - 0.36 * min(epoch / 4, 1.0)))
        one, two = (F.cross_entropy(model(batch[0]), batch[1], reduction="none") for model in (training.model, other))
        easy_for_one, easy_for_two = (each.detach().argsort()[:kept] for each in (one, two))
        loss = one[easy_for_two].mean() + two[easy_for_one].mean()
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in training.optimizers:
            optimizer.step()
        return loss.detach()

    t.update = update


def momentum_contrast(t: Training) -> None:
    """MoCo (He et al., 2020): keys come from a slow copy of the encoder, and wait in a queue to be negatives."""
    t.model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 32),
    )  # fmt: skip
    slow = copy.deepcopy(t.model).requires_grad_(False)
    queue, t.epochs = F.normalize(torch.randn(256, 32), dim=1), 30

    def view(x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) > 0.3) + 0.1 * torch.randn_like(x)

    def update(training: Training, batch: Batch) -> Tensor:
        nonlocal queue
        (optimizer,) = training.optimizers
        query = F.normalize(training.model(view(batch[0])), dim=1)
        with torch.no_grad():
            for kept, new in zip(slow.parameters(), training.model.parameters()):
                kept.lerp_(new, 0.05)
            keys = F.normalize(slow(view(batch[0])), dim=1)
        logits = torch.cat([(query * keys).sum(1, keepdim=True), query @ queue.T], 1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue = torch.cat([keys, queue])[:256]
        return loss.detach()

    t.update = update


def stochastic_rounding(t: Training) -> None:
    """Weights of few bits (Gupta et al., 2015): after a step they are rounded up or down at random."""
    grid, t.epochs = 2.0**-7, 8
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.05, momentum=0.9)]

    @torch.no_grad()
    def on_grid(training: Training) -> None:
        for p in training.parameters():
            p.copy_(torch.floor(p / grid + torch.rand_like(p)) * grid)

    on_grid(t)
    t.each_step.append(on_grid)


class LargestHalf(torch.autograd.Function):
    """1 for the larger half of the scores, 0 for the others; the gradient passes."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, scores: Tensor) -> Tensor:
        return (scores >= scores.median()).to(scores.dtype)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        return gradient


class Subnetwork(nn.Linear):
    """A layer whose weights stay as they were drawn; which of them are there is learned."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__(into, out, bias=False)
        with torch.no_grad():
            self.weight.copy_(torch.randn_like(self.weight).sign() * (4 / into) ** 0.5)
        self.weight.requires_grad_(False)
        self.scores = nn.Parameter(torch.empty_like(self.weight))
        nn.init.kaiming_uniform_(self.scores, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * LargestHalf.apply(self.scores.abs()))


def found_subnetwork(t: Training) -> None:
    """Edge-popup (Ramanujan et al., 2020): a good network is found within a random one, whose weights never learn."""
    t.model = nn.Sequential(Subnetwork(20, 128), nn.ReLU(), Subnetwork(128, 128), nn.ReLU(), Subnetwork(128, 10))
    t.epochs = 12
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.1, momentum=0.9)]


def gradient_normalised(t: Training) -> None:
    """GradNorm (Chen et al., 2018): the weights of three tasks learn, so that the tasks teach at like rates."""
    x, y = t.data.tensors
    t.data = TensorDataset(x, torch.cat([y, 3 * x[:, 9:10].sin(), 0.3 * x[:, 10:11] * x[:, 11:12]], 1))
    t.model[4] = nn.Linear(64, 3)
    shared, balance = t.model[2].weight, nn.ParameterList([nn.Parameter(torch.zeros(3))])
    t.extra.append(balance)
    t.epochs, first = 10, torch.zeros(3)
    t.optimizers_of = lambda training: [
        Adam(training.model.parameters(), lr=t.lr), Adam(balance.parameters(), lr=0.025),
    ]  # fmt: skip

    def update(training: Training, batch: Batch) -> Tensor:
        losses = (training.model(batch[0]) - batch[1]).square().mean(0)
        if training.steps == 0:
            first.copy_(losses.detach())
        weights = 3 * balance[0].softmax(0)
        norms = torch.stack(
            [torch.autograd.grad(each, shared, create_graph=True)[0].norm() for each in weights * losses]
        )
        progress = losses.detach() / first
        aim = norms.mean().detach() * progress / progress.mean()
        (pull,) = torch.autograd.grad((norms - aim).abs().sum(), balance[0], retain_graph=True)
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        (weights.detach() * losses).sum().backward()
        balance[0].grad = pull
        for optimizer in training.optimizers:
            optimizer.step()
        return progress.mean()

    t.update = update


def forward_gradient(t: Training) -> None:
    """Forward gradients (Baydin et al., 2022): derivatives along drawn directions, and nothing goes back."""
    t.model, t.epochs, t.batch_size, draws = mlp(width=32), 20, 64, 64
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.1)]

    @torch.no_grad()
    def update(training: Training, batch: Batch) -> Tensor:
        h, y = batch
        along = {p: torch.randn(draws, *p.shape) for p in training.parameters()}
        tangent = torch.zeros(draws, *h.shape)
        for layer in training.model:
            if isinstance(layer, nn.Linear):
                moved = torch.einsum("ni,koi->kno", h, along[layer.weight]) + along[layer.bias].unsqueeze(1)
                tangent = tangent @ layer.weight.T + moved
            else:
                tangent = tangent * (h > 0)
            h = layer(h)
        slopes = ((h.softmax(1) - F.one_hot(y, 10)) * tangent).sum(2).mean(1)
        for p in training.parameters():
            p.grad = torch.einsum("k,k...->...", slopes, along[p]) / draws
        training.optimizers[0].step()
        return F.cross_entropy(h, y)

    t.update = update


def soup(t: Training) -> None:
    """A greedy model soup (Wortsman et al., 2022): the mean of those of several tunings that help it."""
    x, y = t.data.tensors
    t.data, held_out = TensorDataset(x[:-128], y[:-128]), (x[-128:], y[-128:])
    t.optimizers_of = lambda training: [AdamW(training.parameters(), lr=t.lr)]

    def train(training: Training) -> Iterator[Tensor]:
        for _ in range(training.epochs):
            for batch in training.batches:
                yield training.plain_update(batch)

    @torch.no_grad()
    def accuracy(model: nn.Module, weights: dict[str, Tensor]) -> float:
        return float((functional_call(model, weights, (held_out[0],)).argmax(1) == held_out[1]).float().mean())

    def cook(training: Training) -> Iterator[Tensor]:
        model, (optimizer,) = training.model, training.optimizers
        yield from train(training)
        first, tuned = copy.deepcopy(model.state_dict()), []
        for lr, decay in ((1e-3, 0.0), (3e-3, 0.0), (1e-3, 0.1), (3e-3, 0.1)):
            model.load_state_dict(first)
            optimizer.state.clear()
            optimizer.param_groups[0].update(lr=lr, weight_decay=decay)
            yield from train(training)
            tuned.append(copy.deepcopy(model.state_dict()))
        tuned.sort(key=lambda weights: accuracy(model, weights), reverse=True)
        kept = tuned[:1]
        mean = kept[0]
        for weights in tuned[1:]:
            tried = {name: torch.stack([each[name] for each in (*kept, weights)]).mean(0) for name in weights}
            if accuracy(model, tried) >= accuracy(model, mean):
                kept, mean = [*kept, weights], tried
        model.load_state_dict(mean)

    t.loop = cook
