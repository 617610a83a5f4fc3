"""The other six of the second dozen that is kept out: loops as people write them."""

from __future__ import annotations

import copy
import logging
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, MultiStepLR
from torch.utils.data import DataLoader, TensorDataset, random_split

from zoo.programs.training import Batch, Training

log = logging.getLogger(__name__)


@dataclass
class TrainerConfig:
    """Defaults of a project; each run overrides some."""

    epochs: int = 100
    lr: float = 1e-3
    weight_decay: float = 1e-4
    patience: int = 10
    min_delta: float = 0.0
    grad_clip: float | None = None
    warmup_epochs: int = 0  # only the larger models use it
    val_fraction: float = 0.2


class Trainer:
    """Fits, looks at the held-out part after each epoch, stops early and brings the best weights back."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, scheduler: Any, config: TrainerConfig) -> None:
        self.model, self.optimizer, self.scheduler, self.config = model, optimizer, scheduler, config
        self.criterion = nn.CrossEntropyLoss()
        self.history: dict[str, list[float]] = {"train_loss": [], "val_loss": [], "val_acc": [], "lr": []}
        self.best_loss, self.best_state, self.bad_epochs = float("inf"), copy.deepcopy(model.state_dict()), 0

    def train_one_epoch(self, loader: Any) -> Iterator[Tensor]:
        self.model.train()
        total, count = 0.0, 0
        for inputs, targets in loader:
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.criterion(self.model(inputs), targets)
            loss.backward()
            if self.config.grad_clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
            self.optimizer.step()
            total, count = total + loss.item() * len(inputs), count + len(inputs)
            yield loss.detach()
        self.history["train_loss"].append(total / count)

    @torch.no_grad()
    def evaluate(self, loader: Any) -> tuple[float, float]:
        self.model.eval()
        total, right, count = 0.0, 0, 0
        for inputs, targets in loader:
            logits = self.model(inputs)
            total += self.criterion(logits, targets).item() * len(targets)
            right += int((logits.argmax(1) == targets).sum())
            count += len(targets)
        return total / count, right / count

    def fit(self, train_loader: Any, val_loader: Any) -> Iterator[Tensor]:
        for _ in range(self.config.epochs):
            yield from self.train_one_epoch(train_loader)
            val_loss, val_acc = self.evaluate(val_loader)
            self.history["lr"].append(self.optimizer.param_groups[0]["lr"])
            self.scheduler.step()
            self.history["val_loss"].append(val_loss)
            self.history["val_acc"].append(val_acc)
            if val_loss < self.best_loss - self.config.min_delta:
                self.best_loss, self.bad_epochs = val_loss, 0
                self.best_state = copy.deepcopy(self.model.state_dict())
            else:
                self.bad_epochs += 1
                if self.bad_epochs >= self.config.patience:
                    break
        self.model.load_state_dict(self.best_state)


def trainer_class(t: Training) -> None:
    """Everyday practice: a Trainer with a config, a history, early stopping and the best weights at its end."""
    config = TrainerConfig(epochs=20, lr=5e-3, patience=4, grad_clip=5.0)
    held_out = int(len(t.data) * config.val_fraction)
    train_set, val_set = random_split(t.data, [len(t.data) - held_out, held_out])
    t.data = TensorDataset(*t.data[train_set.indices])
    t.optimizers_of = lambda training: [AdamW(training.parameters(), lr=config.lr, weight_decay=config.weight_decay)]
    t.scheduler_of = lambda optimizer: CosineAnnealingLR(optimizer, T_max=config.epochs)

    def loop(training: Training) -> Iterator[Tensor]:
        trainer = Trainer(training.model, training.optimizers[0], training.scheduler, config)
        yield from trainer.fit(training.batches, DataLoader(val_set, batch_size=128))

    t.loop = loop


class MultiHeadNet(nn.Module):
    """One body; a dict of heads."""

    def __init__(self, features: int, heads: dict[str, int]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, 96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 64), nn.ReLU())
        self.heads = nn.ModuleDict({name: nn.Linear(64, size) for name, size in heads.items()})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        shared = self.body(x)
        return {name: head(shared) for name, head in self.heads.items()}


def several_heads(t: Training) -> None:
    """Everyday practice (Caruana, 1997): a value, a sign and a band from one body, by a dict of weights."""
    weights = {"value": 1.0, "sign": 0.5, "band": 0.3}
    t.model = MultiHeadNet(12, {"value": 1, "sign": 1, "band": 3})
    t.epochs = 15
    t.scheduler_of = lambda optimizer: ExponentialLR(optimizer, gamma=0.9)

    def compute_losses(out: dict[str, Tensor], y: Tensor) -> dict[str, Tensor]:
        band = torch.bucketize(y.squeeze(1), torch.tensor([-0.5, 0.5]))
        return {
            "value": F.smooth_l1_loss(out["value"], y),
            "sign": F.binary_cross_entropy_with_logits(out["sign"], (y > 0).float()),
            "band": F.cross_entropy(out["band"], band),
        }

    def loop(training: Training) -> Iterator[Tensor]:
        (optimizer,), model = training.optimizers, training.model
        for epoch in range(training.epochs):
            model.train()
            running: dict[str, float] = defaultdict(float)
            for i, (x, y) in enumerate(training.batches):
                losses = compute_losses(model(x), y)
                loss = torch.stack([weights[name] * value for name, value in losses.items()]).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                for name, value in losses.items():
                    running[name] += value.item()
                if i % 10 == 9:
                    log.info("[%d, %d] %s", epoch, i + 1, {name: value / 10 for name, value in running.items()})
                    running.clear()
                yield loss.detach()
            assert training.scheduler is not None
            training.scheduler.step()

    t.loop = loop


class PackedLSTM(nn.Module):
    """Both directions' last states of a packed batch."""

    def __init__(self, hidden: int = 24, classes: int = 4) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, hidden, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * hidden, classes)

    def forward(self, padded: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return self.fc(torch.cat([hidden[0], hidden[1]], 1))


def macro_f1(y_true: np.ndarray, y_pred: np.ndarray, classes: int) -> float:
    """The mean over classes, from a confusion matrix."""
    confusion = np.zeros((classes, classes))
    np.add.at(confusion, (y_true, y_pred), 1)
    hits = np.diag(confusion)
    return float(np.mean(2 * hits / np.maximum(confusion.sum(0) + confusion.sum(1), 1)))


def collate_ragged(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Pads to the longest of the batch."""
    series, labels = zip(*items)
    return pad_sequence(list(series), batch_first=True), torch.tensor([len(s) for s in series]), torch.tensor(labels)


def ragged_series(t: Training) -> None:
    """Everyday practice: a custom collate, a packed LSTM, class weights for a rare class, macro F1 by NumPy."""
    x, y = t.data.tensors
    keep = (y != 3) | (torch.rand(len(y)) < 0.3)
    x, y = x[keep], y[keep]
    lengths, cut = torch.randint(10, 17, (len(y),)), int(0.85 * len(y))
    rows = [(each[:length], int(label)) for each, length, label in zip(x, lengths.tolist(), y)]
    counts = torch.bincount(y[:cut], minlength=4)
    criterion = nn.CrossEntropyLoss(weight=counts.sum() / (4 * counts))
    t.model, t.lr, t.loaded = PackedLSTM(), 1e-2, False

    def loop(training: Training) -> Iterator[Tensor]:
        model, (optimizer,), best_f1 = training.model, training.optimizers, 0.0
        train_loader = DataLoader(rows[:cut], batch_size=32, shuffle=True, collate_fn=collate_ragged)
        val_loader = DataLoader(rows[cut:], batch_size=64, collate_fn=collate_ragged)
        for epoch in range(12):
            model.train()
            for padded, sizes, labels in train_loader:
                optimizer.zero_grad()
                loss = criterion(model(padded, sizes), labels)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                yield loss.detach()
            model.eval()
            y_true, y_pred = [], []
            with torch.no_grad():
                for padded, sizes, labels in val_loader:
                    y_pred.append(model(padded, sizes).argmax(1).numpy())
                    y_true.append(labels.numpy())
            best_f1 = max(best_f1, macro_f1(np.concatenate(y_true), np.concatenate(y_pred), 4))
            log.info("epoch %d best macro F1 %.3f", epoch, best_f1)

    t.loop = loop


class Callback:
    """What may happen while fit() runs; all of it is optional."""

    def on_epoch_end(self, fitter: Fitter, logs: dict[str, float]) -> None: ...

    def on_batch_end(self, fitter: Fitter, loss: float) -> None: ...


class Checkpoint(Callback):
    """Keeps the weights of the best epoch."""

    best, state = float("inf"), None

    def on_epoch_end(self, fitter: Fitter, logs: dict[str, float]) -> None:
        if logs["val_loss"] < self.best:
            self.best = logs["val_loss"]
            self.state = {k: v.detach().clone() for k, v in fitter.model.state_dict().items()}


class CsvLog(Callback):
    """Rows for a spreadsheet, with a smoothed loss."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.smooth: float | None = None

    def on_batch_end(self, fitter: Fitter, loss: float) -> None:
        self.smooth = loss if self.smooth is None else 0.9 * self.smooth + 0.1 * loss

    def on_epoch_end(self, fitter: Fitter, logs: dict[str, float]) -> None:
        self.rows.append(",".join(f"{value:.4f}" for value in (self.smooth or 0.0, *logs.values())))


@dataclass
class Fitter:
    """Model, optimizer and a list of callbacks."""

    model: nn.Module
    optimizer: Optimizer
    callbacks: list[Callback]

    def notify(self, event: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *args)

    def fit(self, train: Any, x_val: Tensor, y_val: Tensor, scheduler: Any, epochs: int) -> Iterator[Tensor]:
        for _ in range(epochs):
            self.model.train()
            for x, y in train:
                loss = F.cross_entropy(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.notify("on_batch_end", loss.item())
                yield loss.detach()
            scheduler.step()
            self.model.eval()
            with torch.inference_mode():
                out = self.model(x_val)
                accuracy = (out.argmax(1) == y_val).float().mean().item()
                self.notify("on_epoch_end", {"val_loss": F.cross_entropy(out, y_val).item(), "val_acc": accuracy})


def callbacks(t: Training) -> None:
    """Everyday practice: fit() with callbacks, standardised columns, BatchNorm and dropout, milestones for SGD."""
    x, y = t.data.tensors
    x = 5 + 3 * x * torch.linspace(0.5, 2, x.shape[1])  # columns as they come, each in its unit
    x = (x - x[:832].mean(0)) / x[:832].std(0)
    hidden = [nn.Linear(20, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2)]
    t.model, t.data = nn.Sequential(*hidden, nn.Linear(128, 10)), TensorDataset(x[:832], y[:832])
    t.optimizers_of = lambda training: [
        SGD(training.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    ]
    t.scheduler_of = lambda optimizer: MultiStepLR(optimizer, milestones=[10, 14], gamma=0.1)

    def loop(training: Training) -> Iterator[Tensor]:
        checkpoint = Checkpoint()
        fitter = Fitter(training.model, training.optimizers[0], [checkpoint, CsvLog()])
        yield from fitter.fit(training.batches, x[832:], y[832:], training.scheduler, 16)
        assert checkpoint.state is not None
        training.model.load_state_dict(checkpoint.state)

    t.loop = loop


def pretraining_script(t: Training) -> None:
    """Everyday practice (nanoGPT, Karpathy, 2022): random crops, a learning rate by hand, micro-steps, estimates."""
    max_iters, eval_interval, eval_iters, warmup_iters, min_lr = 200, 50, 4, 20, 3e-4
    learning_rate, batch_size, block_size, micro_steps = 3e-3, 16, 15, 2
    stream = t.data.tensors[0].flatten()
    splits = {"train": stream[: int(0.9 * len(stream))], "val": stream[int(0.9 * len(stream)) :]}
    t.loaded, t.accumulation = False, micro_steps

    def get_batch(split: str) -> Batch:
        data = splits[split]
        ix = torch.randint(len(data) - block_size, (batch_size,)).tolist()
        x, y = (torch.stack([data[i + ahead : i + ahead + block_size] for i in ix]) for ahead in (0, 1))
        return x, y

    def get_lr(it: int) -> float:
        if it < warmup_iters:
            return learning_rate * (it + 1) / (warmup_iters + 1)
        ratio = (it - warmup_iters) / (max_iters - warmup_iters)
        return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)

    def forward(model: nn.Module, split: str) -> Tensor:
        x, y = get_batch(split)
        logits = model(x)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), y.reshape(-1))

    @torch.no_grad()
    def estimate_loss(model: nn.Module) -> dict[str, float]:
        model.eval()
        out = {split: float(np.mean([forward(model, split).item() for _ in range(eval_iters)])) for split in splits}
        model.train()
        return out

    def configure(training: Training) -> list[Optimizer]:
        params = training.parameters()
        decay, rest = [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return [AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))]

    def loop(training: Training) -> Iterator[Tensor]:
        model, (optimizer,), best_val = training.model, training.optimizers, 1e9
        for it in range(max_iters):
            for group in optimizer.param_groups:
                group["lr"] = get_lr(it)
            if it % eval_interval == 0:
                losses = estimate_loss(model)
                log.info("step %d: train %.4f, val %.4f", it, losses["train"], losses["val"])
                best_val = min(best_val, losses["val"])
            total = torch.zeros(())
            for _ in range(micro_steps):
                loss = forward(model, "train") / micro_steps
                total += loss.detach()
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield total

    t.optimizers_of, t.loop = configure, loop


def anomalies(t: Training) -> None:
    """Everyday practice (Vincent et al., 2008): a denoising autoencoder on normal rows; odd ones by a percentile."""
    x = t.data.tensors[0]
    normal, held_out = x[:896], x[896:]
    odd = held_out[:, torch.randperm(x.shape[1])]  # the columns no longer belong together
    t.data, t.epochs = TensorDataset(normal, torch.zeros(len(normal))), 15
    t.optimizers_of = lambda training: [Adam(training.parameters(), lr=3e-3, weight_decay=1e-5)]
    aucs: list[float] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        clean = batch[0]
        return F.mse_loss(model(clean + 0.1 * torch.randn_like(clean)), clean)

    def errors(model: nn.Module, rows: Tensor) -> np.ndarray:
        model.eval()
        with torch.no_grad():
            found = ((model(rows) - rows) ** 2).mean(dim=1).cpu().numpy()
        model.train()
        return found

    def report(training: Training, epoch: int) -> None:
        if epoch % 5:
            return
        usual, unusual = errors(training.model, held_out), errors(training.model, odd)
        threshold = np.percentile(errors(training.model, normal), 95)
        aucs.append(float((unusual[:, None] > usual[None, :]).mean()))
        log.info("AUC %.3f, recall %.3f", aucs[-1], float((unusual > threshold).mean()))

    t.loss = loss
    t.each_epoch.append(report)
