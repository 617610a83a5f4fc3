"""Faults of the evaluation, and healthy programs that evaluate in an unusual way."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from zoo.reports.case import Outcome, Place, Watch, fault, fell, healthy, mean
from zoo.reports.material import labelled_pictures, labelled_rows


class Tagger(nn.Module):
    """Classifies each token with a bidirectional GRU and dropout."""

    def __init__(self, words: int, tags: int):
        super().__init__()
        self.src_embed = nn.Embedding(words, 32)
        self.emb_dropout = nn.Dropout(0.3)
        self.encoder = nn.GRU(32, 32, batch_first=True, bidirectional=True)
        self.output_dropout = nn.Dropout(0.3)
        self.output_layer = nn.Linear(64, tags)

    def forward(self, src: Tensor) -> Tensor:
        states, _ = self.encoder(self.emb_dropout(self.src_embed(src)))
        return self.output_layer(self.output_dropout(states))


class TrainManager:
    def __init__(self, model: nn.Module, train: DataLoader[Any], valid: DataLoader[Any], *, back_to_train: bool):
        self.model, self.train_iter, self.valid_iter, self.back_to_train = model, train, valid, back_to_train
        self.optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        self.validation_freq = 60
        self.losses: list[float] = []
        self.modes: list[bool] = []
        self.valid_losses: list[float] = []

    def train_and_validate(self, epochs: int) -> None:
        for _epoch_no in range(epochs):
            self.model.train()
            for src, trg in self.train_iter:
                self.modes.append(self.model.training)
                self.losses.append(self._train_step(src, trg))
                if len(self.losses) % self.validation_freq == 0:
                    self.valid_losses.append(self._validate())

    def _train_step(self, src: Tensor, trg: Tensor) -> float:
        loss = F.cross_entropy(self.model(src).flatten(0, 1), trg.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def _validate(self) -> float:
        self.model.eval()
        with torch.no_grad():
            parts = [F.cross_entropy(self.model(src).flatten(0, 1), trg.flatten()) for src, trg in self.valid_iter]
        if self.back_to_train:
            self.model.train()
        return torch.stack(parts).mean().item()


@fault(
    "stays_in_eval",
    "validation within the epoch leaves the model in eval mode",
    sources=["joeynmt/joeynmt#184", "wkentaro/pytorch-fcn#56", "pfnet/pytorch-pfn-extras#688"],
    stage="evaluation",
    diagnosis=[
        r"\beval\b & (train|mode|left|stay|still|remain|forgot|back)",
        r"evaluation mode",
        r"dropout & (off|inactive|disabled|not active|no longer) & !rate & !\bval",
    ],
    where=[Place(line=r"\.eval\(\)|_validate\(|_train_step\(|\.train\(\)"), Place(module="dropout|^$")],
    onset=60,
)
def stays_in_eval(watch: Watch, seed: int, faulty: bool) -> Outcome:
    words = torch.randint(1, 40, (4096, 12))
    tags = (words + words.roll(1, dims=1)) % 5
    train = DataLoader(TensorDataset(words[:3840], tags[:3840]), batch_size=32, shuffle=True)
    valid = DataLoader(TensorDataset(words[3840:], tags[3840:]), batch_size=128)
    manager = TrainManager(Tagger(40, 5), train, valid, back_to_train=not faulty)
    with watch(manager.model, manager.optimizer, loader=train):
        manager.train_and_validate(3)
    in_train_mode = sum(manager.modes) / len(manager.modes)
    numbers = {"steps_in_train_mode": in_train_mode, "valid_losses": [round(each, 3) for each in manager.valid_losses]}
    return Outcome(manager.losses, in_train_mode < 0.6, numbers)


class Hourglass(nn.Module):
    """Images (batch, 1, 16, 16) to heatmaps (batch, 16, 16) of one key point, through half the resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.inner = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16))
        self.head = nn.Conv2d(16, 1, 1)

    def forward(self, imgs: Tensor) -> Tensor:
        return self.head(F.relu(self.up(self.inner(self.down(imgs))))).squeeze(1)


def key_points(count: int, brightness: float) -> tuple[Tensor, Tensor]:
    """Images (count, 1, 16, 16) with one bright blob on noise, and heatmaps (count, 16, 16) of its center."""
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    center = 2 + 11 * torch.rand(count, 2, 1, 1)
    distance = (y - center[:, 0]) ** 2 + (x - center[:, 1]) ** 2
    pictures = brightness + torch.exp(-distance / 8) + 0.1 * torch.randn(count, 16, 16)
    return pictures.unsqueeze(1), torch.exp(-distance / 2)


@fault(
    "validation_in_train_mode",
    "validation runs in train mode, and the running statistics take in its samples",
    sources=["princeton-vl/pytorch_stacked_hourglass#44", "wolny/pytorch-3dunet#53"],
    stage="evaluation",
    diagnosis=[
        r"(train mode|training mode|train\b|not in eval|without eval|eval\b) & (valid|evaluat|no grad|inference)",
        r"(running|statistic|batch ?norm)\w* & (valid|evaluat|no grad|held out)",
    ],
    where=[
        Place(line=r"\.train\(\)|make_network\(|config\[|net\(imgs\)"),
        Place(module="down|inner|up|BatchNorm|^$"),
    ],
    onset=48,
)
def validation_in_train_mode(watch: Watch, seed: int, faulty: bool) -> Outcome:
    loaders = {
        "train": DataLoader(TensorDataset(*key_points(768, 0.0)), batch_size=16, shuffle=True),
        "valid": DataLoader(TensorDataset(*key_points(256, 0.1)), batch_size=16),
    }
    net = Hourglass()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)

    def make_network(phase: str, imgs: Tensor, heatmaps: Tensor) -> float:
        if phase == "train" or faulty:
            net.train()
        else:
            net.eval()
        with torch.set_grad_enabled(phase == "train"):
            loss = F.mse_loss(net(imgs), heatmaps)
        if phase == "train":
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    losses, valid_losses, moves = [], [], []
    with watch(net, optimizer, loader=loaders["train"]):
        for _epoch in range(5):
            for imgs, heatmaps in loaders["train"]:
                losses.append(make_network("train", imgs, heatmaps))
            before = net.down[1].running_mean.clone()
            valid_losses.append(mean([make_network("valid", *batch) for batch in loaders["valid"]]))
            moves.append((net.down[1].running_mean - before).norm().item())
    return Outcome(losses, min(moves) > 0.01, {"moves_of_running_mean": moves, "valid_losses": valid_losses})


class Accuracy:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.correct = self.total = 0

    def update(self, predictions: Tensor, targets: Tensor) -> float:
        self.correct += int((predictions.argmax(1) == targets).sum())
        self.total += len(targets)
        return self.correct / self.total


@fault(
    "metric_not_reset",
    "the validation accuracy counts the samples of all earlier validations too",
    sources=["MichiganCOG/ViP#34", "JetBrains-Research/code2seq#112"],
    stage="evaluation",
    diagnosis=[
        r"(metric|accuracy|score|count|total|average)\w* & (reset|accumulat|earlier|previous|carr|all epochs)",
    ],
    where=[Place(line=r"\.update\(|Accuracy\(\)|\.total|\.correct")],
    onset=120,
)
def metric_not_reset(watch: Watch, seed: int, faulty: bool) -> Outcome:
    x, y = labelled_rows(2432, seed, noise=0.3)
    train_loader = DataLoader(TensorDataset(x[:1920], y[:1920]), batch_size=32, shuffle=True)
    valid_loader = DataLoader(TensorDataset(x[1920:], y[1920:]), batch_size=64)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    acc_metric = Accuracy()
    losses, reported, true = [], [], []
    with watch(model, optimizer, loader=train_loader):
        for _epoch in range(8):
            model.train()
            for inputs, targets in train_loader:
                loss = F.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            model.eval()
            if not faulty:
                acc_metric.reset()
            with torch.no_grad():
                for inputs, targets in valid_loader:
                    acc = acc_metric.update(model(inputs), targets)
            reported.append(acc)
            with torch.no_grad():
                true.append((model(x[1920:]).argmax(1) == y[1920:]).float().mean().item())
    return Outcome(losses, abs(reported[-1] - true[-1]) > 0.02, {"reported": reported[-1], "true": true[-1]})


@healthy(
    "batch_norm_recalibrated",
    "before each evaluation the averaged model runs in train mode on training batches, for its running statistics",
    sources=["facebookresearch/schedule_free#60"],
)
def batch_norm_recalibrated(watch: Watch, seed: int) -> Outcome:
    images, labels = labelled_pictures(1792, seed)
    train_loader = DataLoader(TensorDataset(images[:1536], labels[:1536]), batch_size=32, shuffle=True)
    val_loader = DataLoader(TensorDataset(images[1536:], labels[1536:]), batch_size=128)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )
    averaged = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, moves, val_losses = [], [], []
    with watch(model, optimizer, loader=train_loader):
        for _epoch in range(5):
            model.train()
            for inputs, targets in train_loader:
                loss = F.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                with torch.no_grad():
                    for mine, its in zip(averaged.parameters(), model.parameters()):
                        mine.lerp_(its, 0.05)
            before = averaged[1].running_mean.clone()
            averaged.train()
            with torch.no_grad():
                for number, (inputs, _) in enumerate(train_loader):
                    averaged(inputs)
                    if number == 30:
                        break
            moves.append((averaged[1].running_mean - before).norm().item())
            averaged.eval()
            with torch.no_grad():
                val_losses.append(mean([F.cross_entropy(averaged(x), y).item() for x, y in val_loader]))
    works = min(moves) > 0 and val_losses[-1] < 0.5 and fell(losses, 0.5)
    return Outcome(losses, works, {"val_losses": val_losses})


@healthy(
    "k_fold",
    "cross validation: the training rows of one fold are the validation rows of another, each fold has a new model",
    sources=["skorch-dev/skorch#1073", "Lightning-AI/pytorch-lightning#16902"],
)
def k_fold(watch: Watch, seed: int) -> Outcome:
    x, y = labelled_rows(1280, seed, noise=0.3)
    dataset = TensorDataset(x, y)
    folds = torch.randperm(len(dataset)).chunk(4)
    losses, scores = [], []
    for held_out, fold in enumerate(folds):
        rest = torch.cat([other for number, other in enumerate(folds) if number != held_out])
        train_loader = DataLoader(Subset(dataset, rest.tolist()), batch_size=32, shuffle=True)
        val_loader = DataLoader(Subset(dataset, fold.tolist()), batch_size=64)
        model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        with watch(model, optimizer, loader=train_loader):
            for _epoch in range(4):
                model.train()
                for inputs, targets in train_loader:
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(inputs), targets)
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
                model.eval()
                with torch.no_grad():
                    correct = sum(int((model(a).argmax(1) == b).sum()) for a, b in val_loader)
        scores.append(correct / len(fold))
    return Outcome(losses, mean(scores) > 0.5 and fell(losses[:120], 0.8), {"scores": scores})
