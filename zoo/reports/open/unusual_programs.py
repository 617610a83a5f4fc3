"""Healthy programs with an unusual loop or model."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zoo.reports.case import Outcome, Watch, fell, healthy, mean


class BinarizeLinear(nn.Linear):
    """A linear layer on the signs of its weights and inputs, with straight-through gradients."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        signs = input + (input.sign() - input).detach()
        weight = self.weight + (self.weight.sign() - self.weight).detach()
        return F.linear(signs, weight, self.bias)


@healthy(
    "binary_weights",
    "a binarized network: signs with a straight-through gradient, and real weights that are clamped to [-1, 1]",
    sources=["https://github.com/itayhubara/BinaryNet.pytorch", "https://arxiv.org/abs/1602.02830"],
)
def binary_weights(watch: Watch, seed: int) -> Outcome:
    x = torch.randn(2560, 24)
    y = (x @ torch.randn(24, 5)).argmax(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    model = nn.Sequential(
        BinarizeLinear(24, 256),
        nn.BatchNorm1d(256),
        nn.Hardtanh(),
        BinarizeLinear(256, 256),
        nn.BatchNorm1d(256),
        nn.Hardtanh(),
        nn.Linear(256, 5),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    with watch(model, optimizer, loader=loader):
        for _epoch in range(10):
            for data, target in loader:
                loss = F.cross_entropy(model(data), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    for layer in model:
                        if isinstance(layer, BinarizeLinear):
                            layer.weight.clamp_(-1, 1)
                losses.append(loss.item())
    return Outcome(losses, fell(losses, 0.8), {"last_loss": mean(losses[-20:])})


class RNNModel(nn.Module):
    def __init__(self, ntoken: int, ninp: int = 32, nhid: int = 96):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid)
        self.decoder = nn.Linear(nhid, ntoken)

    def forward(self, data: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, hidden = self.rnn(self.encoder(data), hidden)
        return self.decoder(output).flatten(0, 1), hidden


@healthy(
    "carried_hidden_state",
    "a language model carries its detached hidden state over a text that is never shuffled, at a learning rate of 4",
    sources=["https://github.com/pytorch/examples/tree/main/word_language_model"],
)
def carried_hidden_state(watch: Watch, seed: int) -> Outcome:
    text = torch.randint(12, (40, 9)).repeat_interleave(2, 0)[torch.randint(80, (1600,))].flatten()
    corpus = text[: len(text) // 16 * 16].view(16, -1).t().contiguous()
    train, val = corpus[:780], corpus[780:]
    bptt = 15
    model = RNNModel(12)
    optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
    losses: list[float] = []
    val_losses: list[float] = []
    with watch(model, optimizer):
        for _epoch in range(5):
            model.train()
            hidden = (torch.zeros(1, 16, 96), torch.zeros(1, 16, 96))
            for i in range(0, len(train) - 1, bptt):
                length = min(bptt, len(train) - 1 - i)
                hidden = (hidden[0].detach(), hidden[1].detach())
                optimizer.zero_grad()
                output, hidden = model(train[i : i + length], hidden)
                loss = F.cross_entropy(output, train[i + 1 : i + 1 + length].flatten())
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.25)
                optimizer.step()
                losses.append(loss.item())
            model.eval()
            with torch.no_grad():
                output, _hidden = model(val[:-1], (torch.zeros(1, 16, 96), torch.zeros(1, 16, 96)))
                val_losses.append(F.cross_entropy(output, val[1:].flatten()).item())
            if val_losses[-1] > min(val_losses):
                for group in optimizer.param_groups:
                    group["lr"] /= 4
    return Outcome(losses, fell(losses, 0.93), {"val_losses": val_losses})


@healthy(
    "energy_model_with_langevin_samples",
    "an energy model: its samples are made by gradient steps on inputs, and the loss is a difference around 0",
    sources=["https://github.com/openai/ebm_code_release", "https://arxiv.org/abs/1903.08689"],
)
def energy_model_with_langevin_samples(watch: Watch, seed: int) -> Outcome:
    angle = torch.randint(6, (6400,)) * (2 * torch.pi / 6)
    points = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(6400, 2)
    loader = DataLoader(TensorDataset(points), batch_size=64, shuffle=True)
    energy = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(energy.parameters(), lr=1e-3, betas=(0.0, 0.999))
    buffer = 4 * torch.rand(1024, 2) - 2
    losses, distances = [], []
    with watch(energy, optimizer, loader=loader):
        for _epoch in range(4):
            for (real,) in loader:
                chosen = torch.randint(len(buffer), (len(real),))
                samples = torch.where(torch.rand(len(real), 1) < 0.05, 4 * torch.rand(len(real), 2) - 2, buffer[chosen])
                for parameter in energy.parameters():
                    parameter.requires_grad_(False)
                for _step in range(15):
                    samples = samples.detach().requires_grad_(True)
                    (slope,) = torch.autograd.grad(energy(samples).sum(), samples)
                    samples = samples - 0.1 * slope.clamp(-1, 1) + 0.02 * torch.randn_like(samples)
                samples = samples.detach()
                buffer[chosen] = samples
                for parameter in energy.parameters():
                    parameter.requires_grad_(True)
                up, down = energy(samples), energy(real)
                loss = (down - up).mean() + 0.1 * (down.square() + up.square()).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                distances.append((samples.norm(dim=1) - 1).abs().mean().item())
    close = mean(distances[-20:]) < 0.75 * mean(distances[:5])
    return Outcome(losses, close, {"distance_of_samples": [mean(distances[:5]), mean(distances[-20:])]})


@healthy(
    "head_reset_each_epoch",
    "DeepCluster: clusters of the features are the labels, and each epoch has a new head with its own new optimizer",
    sources=["facebookresearch/deepcluster#59", "https://arxiv.org/abs/1807.05520"],
)
def head_reset_each_epoch(watch: Watch, seed: int) -> Outcome:
    prototypes = torch.randn(10, 24)
    kind = torch.randint(10, (4800,))
    data = prototypes[kind] + 0.5 * torch.randn(4800, 24)
    features = nn.Sequential(nn.Linear(24, 192), nn.BatchNorm1d(192), nn.ReLU(), nn.Linear(192, 16))
    model = nn.ModuleDict({"features": features, "top_layer": nn.Linear(16, 10)})
    start = copy.deepcopy(features)
    optimizer = torch.optim.SGD(features.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-5)
    losses: list[float] = []
    epochs: list[float] = []
    with watch(model, optimizer):
        for _epoch in range(6):
            features.eval()
            with torch.no_grad():
                codes = F.normalize(features(data), dim=1)
            centers = codes[torch.randperm(len(codes))[:10]]
            for _iteration in range(10):
                assigned = (codes @ centers.T).argmax(1)
                sums = torch.zeros_like(centers).index_add_(0, assigned, codes)
                centers = F.normalize(sums + 1e-6 * torch.randn_like(sums), dim=1)
            top_layer = nn.Linear(16, 10)
            nn.init.normal_(top_layer.weight, 0, 0.01)
            nn.init.zeros_(top_layer.bias)
            model["top_layer"] = top_layer
            optimizer_tl = torch.optim.SGD(top_layer.parameters(), lr=0.05, weight_decay=1e-5)
            features.train()
            loader = DataLoader(TensorDataset(data, assigned), batch_size=64, shuffle=True)
            for rows, labels in loader:
                loss = F.cross_entropy(top_layer(features(rows)), labels)
                optimizer.zero_grad()
                optimizer_tl.zero_grad()
                loss.backward()
                optimizer.step()
                optimizer_tl.step()
                losses.append(loss.item())
            epochs.append(mean(losses[-10:]))
    moved = (features[0].weight - start[0].weight).abs().max().item()
    return Outcome(losses, max(epochs) < 1.2 and moved > 0.01, {"loss_at_the_end_of_epochs": epochs})
