"""Legal trainings of several rounds in one run: folds, cycles, generations, stages, rates that wait for no progress."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, Subset, TensorDataset

from zoo.programs.training import Batch, Training


def _begin_again(t: Training) -> None:
    """Fresh weights, statistics and moments."""
    for module in t.model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for optimizer in t.optimizers:
        optimizer.state.clear()


def cross_validated(t: Training) -> None:
    """Cross-validation (Stone, 1974): three folds choose the weight decay with which the last training has all rows."""
    t.optimizers_of = lambda training: [Adam(training.parameters(), lr=training.lr)]
    folds = torch.randperm(len(t.data)).chunk(3)

    def train(training: Training, rows: Tensor, decay: float) -> Iterator[Tensor]:
        _begin_again(training)
        training.optimizers[0].param_groups[0]["weight_decay"] = decay
        loader = DataLoader(Subset(t.data, rows.tolist()), batch_size=32, shuffle=True, drop_last=True)
        for _ in range(training.epochs):
            for batch in loader:
                yield training.plain_update(batch)

    def choose(training: Training) -> Iterator[Tensor]:
        errors: dict[float, float] = {}
        for decay in (0.0, 1e-3, 1e-2):
            errors[decay] = 0.0
            for number, held_out in enumerate(folds):
                rest = torch.cat([rows for other, rows in enumerate(folds) if other != number])
                yield from train(training, rest, decay)
                training.model.eval()
                with torch.no_grad():
                    errors[decay] += float(training.loss(training.model, t.data[held_out]))
                training.model.train()
        yield from train(training, torch.cat(folds), min(errors, key=errors.__getitem__))

    t.loop, t.loaded = choose, False


def snapshots(t: Training) -> None:
    """Snapshot ensembles (Huang et al., 2017): at the end of each cosine cycle the weights are kept, and vote."""
    x, y = t.data.tensors
    t.data, held_out = TensorDataset(x[:-64], y[:-64]), (x[-64:], y[-64:])
    t.epochs, cycle = 16, 4 * ((len(x) - 64) // t.batch_size)
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.1, momentum=0.9)]
    t.scheduler_of = lambda optimizer: LambdaLR(
        optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * (step % cycle) / cycle)
    )
    kept: list[dict[str, Tensor]] = []
    accuracies: list[float] = []

    @torch.no_grad()
    def vote(training: Training) -> None:
        if training.steps % cycle:
            return
        kept.append(copy.deepcopy(training.model.state_dict()))
        training.model.eval()
        votes = [functional_call(training.model, weights, (held_out[0],)).softmax(1) for weights in kept[-3:]]
        accuracies.append(float((torch.stack(votes).mean(0).argmax(1) == held_out[1]).float().mean()))
        training.model.train()

    t.each_step.append(vote)


def born_again(t: Training) -> None:
    """Born-again networks (Furlanello et al., 2018): each generation starts afresh, and learns from the one before."""
    t.epochs, t.lr, length = 24, 1e-2, 8
    teacher: nn.Module | None = None

    def inherit(training: Training, epoch: int) -> None:
        nonlocal teacher
        if epoch > 0 and epoch % length == 0:
            teacher = copy.deepcopy(training.model).eval().requires_grad_(False)
            _begin_again(training)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch[0])
        labels = F.cross_entropy(logits, batch[1])
        if teacher is None:
            return labels
        with torch.no_grad():
            wanted = teacher(batch[0]).softmax(1)
        return labels + F.kl_div(logits.log_softmax(1), wanted, reduction="batchmean")

    t.loss = loss
    t.each_epoch.append(inherit)


class WeakLearner(nn.Module):
    """A shallow network; it sees the inputs, and the hidden layer of the learner before it."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(features, width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.hidden(x).relu()
        return hidden, self.out(hidden)


class GrowNet(nn.Module):
    """A mean, and the sum of what the learners add to it at a common rate."""

    def __init__(self, features: int, mean: Tensor, width: int = 24) -> None:
        super().__init__()
        self.features, self.width, self.learners = features, width, nn.ModuleList([WeakLearner(features, width)])
        self.rate = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", mean)

    def grow(self) -> nn.Module:
        self.learners.append(WeakLearner(self.features + self.width, self.width))
        return self.learners[-1]

    def parts(self, x: Tensor) -> list[Tensor]:
        seen, found = x, []
        for learner in self.learners:
            hidden, out = learner(seen)
            seen = torch.cat([x, hidden], 1)
            found.append(out)
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.mean + self.rate * torch.stack(self.parts(x)).sum(0)


def boosted(t: Training) -> None:
    """GrowNet (Badirli et al., 2020): each new learner fits what is left, then all are corrected together."""
    model = t.model = GrowNet(12, t.data.tensors[1].mean())

    def fit(training: Training, batch: Batch) -> Tensor:
        (optimizer,) = training.optimizers
        with torch.no_grad():
            left = batch[1] - model.mean - model.rate * sum(model.parts(batch[0])[:-1])
        optimizer.zero_grad()
        loss = F.mse_loss(model.parts(batch[0])[-1], left)
        loss.backward(inputs=list(model.learners[-1].parameters()))
        optimizer.step()
        return loss.detach()

    def stages(training: Training) -> Iterator[Tensor]:
        for number in range(4):
            if number > 0:
                training.optimizers[0].add_param_group({"params": list(model.grow().parameters())})
            for _ in range(3):
                for batch in training.batches:
                    yield fit(training, batch)
            for _ in range(2):
                for batch in training.batches:
                    yield training.plain_update(batch)

    t.loop = stages


def plateaus(t: Training) -> None:
    """Everyday practice: where the validation stands still, back to the best weights, and on at a third of the rate."""
    x, y = t.data.tensors
    t.data, held_out = TensorDataset(x[:-128], y[:-128]), (x[-128:], y[-128:])
    t.lr, t.epochs = 2e-2, 14
    t.scheduler_of = lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.3, patience=1)

    def train(training: Training) -> Iterator[Tensor]:
        model, (optimizer,) = training.model, training.optimizers
        best, lowest = copy.deepcopy(model.state_dict()), float("inf")
        for _ in range(training.epochs):
            rate = optimizer.param_groups[0]["lr"]
            for batch in training.batches:
                yield training.plain_update(batch)
            model.eval()
            with torch.no_grad():
                error = float(training.loss(model, held_out))
            model.train()
            training.scheduler.step(error)
            if error < lowest:
                best, lowest = copy.deepcopy(model.state_dict()), error
            elif optimizer.param_groups[0]["lr"] < rate:
                model.load_state_dict(best)
                optimizer.state.clear()
        model.load_state_dict(best)

    t.loop = train


def growing_batch(t: Training) -> None:
    """A batch that grows where the rate would fall (Smith et al., 2018), at a rate that stays what it is."""
    t.epochs, t.loaded = 12, False
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.03, momentum=0.9)]

    def grow(training: Training, epoch: int) -> None:
        size = 16 * 2 ** (epoch // 3)  # 16, 32, 64, 128
        training.batches = DataLoader(training.data, batch_size=size, shuffle=True, drop_last=True)

    t.each_epoch.append(grow)
