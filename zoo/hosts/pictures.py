"""Images: convolutions with batch statistics, augmentation, label smoothing, SGD with momentum, bfloat16 autocast."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset

from zoo.hosts.report import Report, Watch
from zoo.hosts.worlds import CLASSES, images


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Pictures scaled to about zero mean and unit variance, moved by a pixel where they are augmented."""

    def __init__(self, x: Tensor, y: Tensor, augment: bool) -> None:
        self.x, self.y, self.augment = x, y, augment

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = (self.x[index] / 255 - 0.43) / 0.18
        if self.augment:
            dx, dy = torch.randint(0, 3, (2,)).tolist()
            image = F.pad(image, (1, 1, 1, 1))[:, dx : dx + 10, dy : dy + 10]
            image = image + 0.1 * torch.randn(image.shape)
        return image, self.y[index]


class Block(nn.Module):
    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.short = nn.Conv2d(into, out, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        h = self.bn2(self.conv2(h))
        return F.relu(h + self.short(x))


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.block1 = Block(width, width, 1)
        self.block2 = Block(width, 2 * width, 2)
        self.head = nn.Linear(2 * width, CLASSES)
        nn.init.kaiming_normal_(self.stem.weight, nonlinearity="relu")
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.block2(self.block1(F.relu(self.stem(x))))
        return self.head(h.mean(dim=(2, 3)))


def accuracy_of(logits: Tensor, y: Tensor) -> float:
    return (logits.argmax(dim=1) == y).float().mean().item()


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader) -> tuple[float, float]:
    model.eval()
    logits, targets = [], []
    for x, y in batches:
        logits.append(model(x))
        targets.append(y)
    all_logits, all_targets = torch.cat(logits), torch.cat(targets)
    return F.cross_entropy(all_logits, all_targets).item(), accuracy_of(all_logits, all_targets)


def train(watch: Watch, seed: int, epochs: int = 5) -> Report:
    torch.manual_seed(seed)
    x, y = images(seed, 800)
    train_set, val_set = Pictures(x[:560], y[:560], augment=True), Pictures(x[560:], y[560:], augment=False)
    train_batches = DataLoader(train_set, batch_size=40, shuffle=True)
    val_batches = DataLoader(val_set, batch_size=80, shuffle=False)

    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=epochs)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    losses, val_loss, val_accuracy = [], 0.0, 0.0
    with watch(model, optimizer, loader=train_batches, scheduler=scheduler):
        for _ in range(epochs):
            model.train()
            running, seen = 0.0, 0
            for images_batch, labels in train_batches:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    outputs = model(images_batch)
                loss = criterion(outputs.float(), labels)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                running += loss.item() * len(labels)
                seen += len(labels)
            scheduler.step()
            losses.append(running / seen)
            val_loss, val_accuracy = evaluate(model, val_batches)
    return Report(model, {"loss": val_loss, "accuracy": val_accuracy}, losses)
