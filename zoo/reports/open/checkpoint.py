"""Faults of saving, loading and resuming."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zoo.reports.case import Outcome, Place, Watch, fault, fell, mean
from zoo.reports.material import labelled_pictures, text_windows


class CNN:
    """Holds a network that classifies spectrograms, and its optimizer. ``save`` pickles the whole network."""

    def __init__(self, classes: int):
        self.network: nn.Module = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes)),
        )
        self.optimizer = self._init_optimizer()

    def _init_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.network.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)

    def save(self) -> bytes:
        file = io.BytesIO()
        torch.save(self.network, file)
        return file.getvalue()

    def load(self, saved: bytes, *, new_optimizer: bool) -> None:
        self.network = torch.load(io.BytesIO(saved), weights_only=False)
        if new_optimizer:
            self.optimizer = self._init_optimizer()

    def train(self, loader: DataLoader[Any], epochs: int) -> list[float]:
        losses = []
        self.network.train()
        for _epoch in range(epochs):
            for spectrograms, labels in loader:
                self.optimizer.zero_grad()
                loss = F.cross_entropy(self.network(spectrograms), labels)
                loss.backward()
                self.optimizer.step()
                losses.append(loss.item())
        return losses


@fault(
    "optimizer_of_old_model",
    "the network is replaced by the loaded one, and the optimizer still holds the parameters of the old one",
    sources=["kitzeslab/opensoundscape#351", "NVIDIA/Megatron-LM#174"],
    stage="checkpoint",
    diagnosis=[
        r"optimi[sz]er & (not|none|other|old|different|another|stale|missing|absent|belong|replaced|no parameter)"
        r" & (parameter|weight|tensor|model|network)",
    ],
    where=[Place(line=r"torch\.load|\.load\(|_init_optimizer\(|optimizer\.step\(\)")],
)
def optimizer_of_old_model(watch: Watch, seed: int, faulty: bool) -> Outcome:
    images, labels = labelled_pictures(1536, seed, noise=1.0)
    loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)
    first = CNN(10)
    first.train(loader, 1)
    again = CNN(10)
    again.load(first.save(), new_optimizer=not faulty)
    before = [each.detach().clone() for each in again.network.parameters()]
    with watch(again.network, again.optimizer, loader=loader):
        losses = again.train(loader, 5)
    moved = any(not torch.equal(each, old) for each, old in zip(again.network.parameters(), before))
    return Outcome(losses, not moved, {"moved": moved, "losses": [losses[0], mean(losses[-20:])]})


class CharRNN(nn.Module):
    def __init__(self, vocab: int):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(vocab, 32), nn.GRU(32, 64, batch_first=True)
        self.out = nn.Linear(64, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.rnn(self.embed(ids))[0])


def build_dataloader(windows: Tensor, seed: int) -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(windows, batch_size=16, shuffle=True, generator=generator)


@fault(
    "resume_replays_data",
    "after each restart the loader begins the same permutation again",
    sources=["kyutai-labs/pocket-tts#287", "huggingface/accelerate#4203"],
    stage="checkpoint",
    diagnosis=[
        r"(batch|row|sample|data|order|permutation|shuffle|loader)\w*"
        r" & (repeat|same|again|replay|identical|restart|seen before) & !loss is",
        r"(never|not) (drawn|seen|visited|served) & (row|sample|data)",
    ],
    where=[Place(line=r"build_dataloader\(|manual_seed\(|for batch in|shuffle=True")],
    onset=90,
)
def resume_replays_data(watch: Watch, seed: int, faulty: bool) -> Outcome:
    windows = text_windows(8000, 33, seed)
    model = CharRNN(int(windows.max()) + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    checkpoint: dict[str, Any] = {"step": 0}
    losses: list[float] = []
    seen: list[set[int]] = []

    def attempt(stop_step: int) -> None:
        """Train from the checkpoint to ``stop_step``, where the job is interrupted."""
        start_step = checkpoint["step"]
        if start_step:
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        loader = build_dataloader(windows, seed if faulty else seed + start_step)
        seen.append(set())
        for step, batch in enumerate(loader, start_step):
            if step == stop_step:
                break
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seen[-1].update(hash(tuple(row)) for row in batch.tolist())
        state = {"step": stop_step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoint.update(copy.deepcopy(state))

    with watch(model, optimizer):
        for stop_step in (90, 180, 270):
            attempt(stop_step)
    again = len(seen[0] & seen[1]) / len(seen[1])
    return Outcome(losses, again > 0.9 and fell(losses), {"seen_before": again, "last_loss": mean(losses[-20:])})
