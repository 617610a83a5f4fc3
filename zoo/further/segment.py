"""Segmentation: a small U-Net, cross entropy and Dice, flips as augmentation, the best weights are kept."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset

from zoo.further.worlds import blobs
from zoo.hosts.report import Report, Watch


class Scans(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, images: Tensor, masks: Tensor, augment: bool) -> None:
        self.images, self.masks, self.augment = images, masks, augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, mask = (self.images[index] / 255 - 0.4) / 0.15, self.masks[index]
        if self.augment and torch.rand(()) < 0.5:
            image, mask = image.flip(-1), mask.flip(-1)
        return image, mask


class Block(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(into, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(4, out), nn.GroupNorm(4, out)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(h)))


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = Block(1, width)
        self.middle = Block(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join = Block(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down(x)
        coarse = self.middle(F.max_pool2d(fine, 2))
        h = self.join(torch.cat([self.up(coarse), fine], dim=1))
        return self.head(h).squeeze(1)


def dice_loss(logits: Tensor, masks: Tensor) -> Tensor:
    p = logits.sigmoid().flatten(1)
    m = masks.flatten(1)
    overlap = 2 * (p * m).sum(dim=1) + 1
    return (1 - overlap / (p.sum(dim=1) + m.sum(dim=1) + 1)).mean()


def loss_of(logits: Tensor, masks: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, masks) + dice_loss(logits, masks)


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader) -> tuple[float, float]:
    model.eval()
    total, both, either, count = 0.0, 0.0, 0.0, 0
    for images, masks in batches:
        logits = model(images)
        total += loss_of(logits, masks).item() * len(images)
        found = logits > 0
        both += (found & (masks > 0.5)).sum().item()
        either += (found | (masks > 0.5)).sum().item()
        count += len(images)
    model.train()
    return total / count, both / max(either, 1)


def train(watch: Watch, seed: int, epochs: int = 6) -> Report:
    torch.manual_seed(seed)
    images, masks = blobs(seed, 320)
    batches = DataLoader(Scans(images[:240], masks[:240], True), batch_size=16, shuffle=True, drop_last=True)
    held_out = DataLoader(Scans(images[240:], masks[240:], False), batch_size=40)

    model = UNet()
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=epochs * len(batches))
    best, best_state, losses, shown = 0.0, model.state_dict(), [], (0.0, 0.0)
    with watch(model, optimizer, loader=batches, scheduler=scheduler):
        for _ in range(epochs):
            model.train()
            for image, mask in batches:
                loss = loss_of(model(image), mask)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                losses.append(loss.item())
            val_loss, iou = evaluate(model, held_out)
            if iou > best:
                best, shown = iou, (val_loss, iou)
                best_state = copy.deepcopy(model.state_dict())
    model.load_state_dict(best_state)
    return Report(model, {"loss": shown[0], "iou": shown[1]}, losses)
