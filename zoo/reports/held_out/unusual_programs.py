"""Healthy programs with an unusual loop or model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

from zoo.reports.case import Outcome, Watch, fell, healthy, mean


def rows(count: int, features: int, classes: int, noise: float = 0.5) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, features)
    return x, (x @ torch.randn(features, classes) + noise * torch.randn(count, classes)).argmax(1)


@healthy(
    "gradual_unfreezing",
    "ULMFiT: layers are unfrozen one after another, each with a lower learning rate and as a group added on the way",
    sources=["https://arxiv.org/abs/1801.06146", "https://docs.fast.ai/learner.html"],
)
def gradual_unfreezing(watch: Watch, seed: int) -> Outcome:
    x, y = rows(4800, 16, 5)
    trunk = nn.Sequential(nn.Linear(16, 160), nn.ReLU(), nn.Linear(160, 160), nn.ReLU())
    learner = nn.Sequential(trunk, nn.Linear(160, 5))
    pretraining = torch.optim.Adam(learner.parameters(), lr=3e-3)
    for start in range(0, 960, 32):
        pretraining.zero_grad()
        F.cross_entropy(learner(x[start : start + 32]), y[start : start + 32]).backward()
        pretraining.step()
    pretraining.zero_grad()
    trunk.requires_grad_(False)
    learner[1] = nn.Linear(160, 5)
    loader = DataLoader(TensorDataset(x[960:], y[960:]), batch_size=32, shuffle=True)
    optimizer = torch.optim.AdamW([{"params": learner[1].parameters(), "lr": 2e-3}])
    losses: list[float] = []
    with watch(learner, optimizer, loader=loader):
        for epoch in range(6):
            if epoch in (2, 4):
                layer = trunk[2 if epoch == 2 else 0].requires_grad_(True)
                optimizer.add_param_group({"params": list(layer.parameters()), "lr": 2e-3 / 2.6 ** (epoch // 2)})
            for batch, label in loader:
                loss = F.cross_entropy(learner(batch), label)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    groups = len(optimizer.param_groups)
    return Outcome(losses, groups == 3 and fell(losses, 0.8), {"groups": groups, "last_loss": mean(losses[-20:])})


class Prenet(nn.Module):
    """Two layers whose dropout is always on, in evaluation too."""

    def __init__(self, bands: int):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(bands, 32), nn.Linear(32, 32)])

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.layers:
            x = F.dropout(F.relu(linear(x)), p=0.5, training=True)
        return x


class Synthesizer(nn.Module):
    """Mel frames from phonemes; the prenet reads the frame before."""

    def __init__(self, phonemes: int, bands: int):
        super().__init__()
        self.embedding = nn.Embedding(phonemes, 32)
        self.prenet = Prenet(bands)
        self.rnn = nn.GRU(64, 64, batch_first=True)
        self.linear_projection = nn.Linear(64, bands)
        self.gate_layer = nn.Linear(64, 1)

    def forward(self, text: Tensor, mel: Tensor) -> tuple[Tensor, Tensor]:
        before = F.pad(mel, (0, 0, 1, 0))[:, :-1]
        h, _state = self.rnn(torch.cat([self.embedding(text), self.prenet(before)], -1))
        return self.linear_projection(h), self.gate_layer(h).squeeze(-1)


@healthy(
    "prenet_dropout_always_on",
    "Tacotron 2: the dropout of the prenet stays on in evaluation, as its paper says",
    sources=["BogiHsu/Tacotron2-PyTorch#8", "NVIDIA/tacotron2#247"],
)
def prenet_dropout_always_on(watch: Watch, seed: int) -> Outcome:
    sounds = torch.randn(20, 12)
    text = torch.randint(20, (1200, 4)).repeat_interleave(4, dim=1)
    mel = sounds[text] + 0.5 * sounds[text.roll(1, 1)] + 0.1 * torch.randn(1200, 16, 12)
    gate = (torch.arange(16) == 15).float().expand(1200, 16)
    train_loader = DataLoader(TensorDataset(text[:1000], mel[:1000], gate[:1000]), batch_size=25, shuffle=True)
    model = Synthesizer(20, 12)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-6)
    losses: list[float] = []
    val_losses: list[float] = []
    with watch(model, optimizer, loader=train_loader):
        for _epoch in range(4):
            model.train()
            for phonemes, mel_target, gate_target in train_loader:
                model.zero_grad()
                mel_out, gate_out = model(phonemes, mel_target)
                loss = F.mse_loss(mel_out, mel_target) + F.binary_cross_entropy_with_logits(gate_out, gate_target)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.item())
            model.eval()
            with torch.no_grad():
                mel_out, _gate_out = model(text[1000:], mel[1000:])
                val_losses.append(F.mse_loss(mel_out, mel[1000:]).item())
    with torch.no_grad():
        change = (model(text[1000:], mel[1000:])[0] - mel_out).abs().max().item()
    return Outcome(losses, change > 0.01 and fell(losses, 0.6), {"val_losses": val_losses, "change": change})


class SAM:
    """Climbs to the worst weights nearby, and steps with the gradient from there."""

    def __init__(self, base_optimizer: torch.optim.Optimizer, rho: float = 0.05):
        self.base_optimizer, self.rho = base_optimizer, rho
        self.ascent: list[tuple[nn.Parameter, Tensor]] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> None:
        parameters = [p for group in self.base_optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        self.ascent = [(parameter, parameter.grad * self.rho / (norm + 1e-12)) for parameter in parameters]
        for parameter, climb in self.ascent:
            parameter.add_(climb)
        self.base_optimizer.zero_grad()
        with torch.enable_grad():
            closure().backward()
        for parameter, climb in self.ascent:
            parameter.sub_(climb)
        self.base_optimizer.step()
        self.base_optimizer.zero_grad()


@healthy(
    "sharpness_aware",
    "SAM: two forward and two backward passes of one batch in a step, the second at weights that are moved away",
    sources=["https://github.com/davda54/sam", "https://arxiv.org/abs/2010.01412"],
)
def sharpness_aware(watch: Watch, seed: int) -> Outcome:
    x, y = rows(4096, 20, 8, noise=1.0)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sam = SAM(optimizer)
    losses = []
    with watch(model, optimizer, loader=loader):
        for _epoch in range(6):
            for inputs, targets in loader:

                def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
                    return F.cross_entropy(model(inputs), targets, label_smoothing=0.1)

                loss = closure()
                loss.backward()
                sam.step(closure)
                losses.append(loss.item())
    return Outcome(losses, fell(losses, 0.85), {"last_loss": mean(losses[-20:])})


@healthy(
    "weight_average_and_restarts",
    "SGDR and SWA: the learning rate jumps up at each restart, then weights are averaged and a pass in training mode "
    "without gradients computes the statistics of the average",
    sources=["https://github.com/timgaripov/swa", "https://arxiv.org/abs/1608.03983"],
)
def weight_average_and_restarts(watch: Watch, seed: int) -> Outcome:
    x, y = rows(4800, 20, 6, noise=1.0)
    loader = DataLoader(TensorDataset(x[:3840], y[:3840]), batch_size=48, shuffle=True)
    model = nn.Sequential(nn.Linear(20, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=80, T_mult=2)
    swa_model = AveragedModel(model)
    swa_scheduler = SWALR(optimizer, swa_lr=0.03, anneal_epochs=1)
    losses: list[float] = []
    rates: list[float] = []
    with watch(model, optimizer, loader=loader):
        for epoch in range(7):
            model.train()
            for inputs, targets in loader:
                loss = F.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if epoch < 3:
                    scheduler.step()
                losses.append(loss.item())
                rates.append(optimizer.param_groups[0]["lr"])
            if epoch >= 3:
                swa_model.update_parameters(model)
                swa_scheduler.step()
        update_bn(loader, swa_model)
    swa_model.eval()
    with torch.no_grad():
        accuracy = (swa_model(x[3840:]).argmax(1) == y[3840:]).float().mean().item()
    jumps = sum(after > 2 * before for before, after in pairwise(rates))
    return Outcome(losses, jumps >= 1 and accuracy > 0.5 and fell(losses), {"jumps": jumps, "accuracy": accuracy})
