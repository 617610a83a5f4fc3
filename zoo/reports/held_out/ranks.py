"""A fault of training on several ranks, and a healthy program whose replicas differ."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from zoo.reports.case import Outcome, Place, Watch, fault, fell, healthy, mean
from zoo.reports.material import labelled_pictures, labelled_rows


class ConvNet(nn.Module):
    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.layer2 = nn.Sequential(nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        self.fc = nn.Linear(3 * 3 * 32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(x)).flatten(1))


@fault(
    "sampler_epoch_not_set",
    "DistributedSampler.set_epoch is not called: each epoch has the same order and the same batches",
    sources=["pytorch/pytorch#31771", "lucidrains/DALLE-pytorch#230", "yangkky/distributed_tutorial#5"],
    stage="ranks",
    diagnosis=[
        r"set epoch",
        r"(same|identical|equal|repeat)\w* & (order|batch|permutation|shuffl)\w* & epoch",
        r"(order|batch|permutation|shuffl)\w* & (every|each|all|between) epoch",
    ],
    where=[Place(line=r"DistributedSampler\(|DataLoader\(|in train_loader")],
    onset=32,
    shows=33,
    ranks=2,
)
def sampler_epoch_not_set(watch: Watch, seed: int, faulty: bool) -> Outcome:
    images, labels = labelled_pictures(1024, seed)
    train_dataset = TensorDataset(images, labels)
    train_sampler: DistributedSampler[Tensor] = DistributedSampler(train_dataset, seed=seed)
    train_loader = DataLoader(train_dataset, batch_size=16, shuffle=False, sampler=train_sampler)
    model = DistributedDataParallel(ConvNet())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    losses, firsts = [], []
    with watch(model, optimizer, loader=train_loader):
        for epoch in range(6):
            if not faulty:
                train_sampler.set_epoch(epoch)
            for i, (pictures, targets) in enumerate(train_loader):
                if i == 0:
                    firsts.append(pictures)
                loss = criterion(model(pictures), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    same = all(torch.equal(firsts[0], pictures) for pictures in firsts)
    return Outcome(losses, same and fell(losses), {"same_first_batch": same, "last_loss": mean(losses[-20:])})


@healthy(
    "local_sgd",
    "local SGD: the ranks train apart and average their weights at every eighth step",
    sources=["pytorch/pytorch#59699", "huggingface/accelerate#1378"],
    ranks=2,
)
def local_sgd(watch: Watch, seed: int) -> Outcome:
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    x, y = labelled_rows(4096, seed, noise=0.5)
    dataset = TensorDataset(x, y)
    sampler: DistributedSampler[Tensor] = DistributedSampler(dataset, seed=seed)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
    torch.manual_seed(seed + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def differ() -> bool:
        sums: list[float] = [0.0] * world_size
        distributed.all_gather_object(sums, sum(each.double().sum().item() for each in model.parameters()))
        return len(set(sums)) > 1

    losses, apart, together = [], [], []
    with watch(model, optimizer, loader=loader):
        for epoch in range(5):
            sampler.set_epoch(epoch)
            for rows, targets in loader:
                loss = F.cross_entropy(model(rows), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                if len(losses) % 8 == 7:
                    apart.append(differ())
                if len(losses) % 8 == 0:
                    with torch.no_grad():
                        for parameter in model.parameters():
                            distributed.all_reduce(parameter)
                            parameter /= world_size
                    together.append(not differ())
    works = all(apart) and all(together) and fell(losses, 0.6)
    return Outcome(losses, works, {"averaged": len(together), "last_loss": mean(losses[-20:])})
