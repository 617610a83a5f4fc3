"""Faults of training on several ranks."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from zoo.reports.case import Outcome, Place, Watch, fault, fell, mean
from zoo.reports.material import labelled_pictures, labelled_rows


def gathered(value: float) -> list[float]:
    """The value of each rank."""
    values: list[float | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return [float(each) for each in values if each is not None]


@fault(
    "plateau_per_rank",
    "each rank gives its own validation loss to ReduceLROnPlateau: learning rates and then weights differ",
    sources=["lucidrains/DALLE-pytorch#268", "rwth-i6/returnn#1493"],
    stage="ranks",
    diagnosis=[
        r"(rank|process|replica)\w* & (learning rate|\blr\b|schedul)",
        r"(replica|weight|parameter|model)\w* & (differ|diverg|not equal|out of sync|drift) & (rank|process|replica)",
    ],
    where=[Place(line=r"scheduler\.step|ReduceLROnPlateau"), Place(rank=r"\d")],
    onset=25,
    shows=25,
    ranks=2,
)
def plateau_per_rank(watch: Watch, seed: int, faulty: bool) -> Outcome:
    rank = distributed.get_rank()
    x, y = labelled_rows(1696, seed, noise=2.0)
    train_set, val_set = TensorDataset(x[:1600], y[:1600]), TensorDataset(x[1600:], y[1600:])
    sampler: DistributedSampler[Tensor] = DistributedSampler(train_set, seed=seed)
    train_loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=24, sampler=DistributedSampler(val_set, shuffle=False))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    losses: list[float] = []
    shows = None
    with watch(model, optimizer, loader=train_loader, scheduler=scheduler):
        for epoch in range(12):
            sampler.set_epoch(epoch)
            model.train()
            for text, target in train_loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(text), target)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            model.eval()
            with torch.no_grad():
                val_loss = torch.stack([F.cross_entropy(model(a), b) for a, b in val_loader]).mean()
            if not faulty:
                distributed.all_reduce(val_loss)
                val_loss /= distributed.get_world_size()
            scheduler.step(val_loss)
            if shows is None and len(set(gathered(optimizer.param_groups[0]["lr"]))) > 1:
                shows = len(losses)
    rates = gathered(optimizer.param_groups[0]["lr"])
    weights = gathered(sum(each.double().sum().item() for each in model.parameters()))
    numbers = {"rates": rates, "rates_differ_at": shows, "sum_of_weights": weights, "rank": rank}
    return Outcome(losses, shows is not None and weights[0] != weights[1], numbers, shows=shows)


def set_seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


class VelocityNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(1, 128)
        self.net = nn.Sequential(nn.Linear(144, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 144))

    def forward(self, x_t: Tensor, t: Tensor) -> Tensor:
        hidden = self.net[0](x_t) + self.time(t)
        for layer in self.net[1:]:
            hidden = layer(hidden)
        return hidden


@fault(
    "same_noise_on_ranks",
    "all ranks have the same seed and so draw the same noise and times for their different samples",
    sources=["Robbyant/lingbot-vla-v2#41", "threestudio-project/threestudio#195"],
    stage="ranks",
    diagnosis=[
        r"(rank|process|replica)\w* & (same|identical|equal|repeat) & (noise|random|rng|seed|dropout|generator|draw)",
        r"seed & (rank|process|replica)",
    ],
    where=[Place(line=r"set_seed\(|manual_seed|randn_like|torch\.rand\(")],
    ranks=2,
)
def same_noise_on_ranks(watch: Watch, seed: int, faulty: bool) -> Outcome:
    rank = distributed.get_rank()
    set_seed(seed if faulty else seed + rank)
    images, _ = labelled_pictures(4096, seed, noise=0.1)
    dataset = TensorDataset(images.flatten(1))
    sampler: DistributedSampler[Tensor] = DistributedSampler(dataset, seed=seed)
    dataloader = DataLoader(dataset, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(VelocityNet())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses, drawn = [], []
    with watch(model, optimizer, loader=dataloader):
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for (actions,) in dataloader:
                noise = torch.randn_like(actions)
                time = torch.rand(len(actions), 1)
                x_t = time * noise + (1 - time) * actions
                loss = F.mse_loss(model(x_t, time), noise - actions)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                drawn.append(noise.double().sum().item())
    sums = gathered(sum(drawn))
    return Outcome(losses, sums[0] == sums[1] and fell(losses), {"sum_of_noise": sums, "last_loss": mean(losses[-20:])})
