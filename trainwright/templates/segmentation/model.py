"""A small U-Net, and the mean intersection over union."""

import torch
from torch import Tensor, nn


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions that keep height and width."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Maps images (N, 1, H, W) to logits (N, classes, H, W); H and W divide by 4."""

    def __init__(self, width: int = 16, classes: int = 3) -> None:
        super().__init__()
        self.down1, self.down2 = block(1, width), block(width, 2 * width)
        self.bottom = block(2 * width, 4 * width)
        self.up2, self.up1 = block(6 * width, 2 * width), block(3 * width, width)
        self.shrink, self.grow = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.down1(images)
        coarse = self.down2(self.shrink(fine))
        x = self.bottom(self.shrink(coarse))
        x = self.up2(torch.cat([self.grow(x), coarse], dim=1))
        x = self.up1(torch.cat([self.grow(x), fine], dim=1))
        return self.head(x)


def mean_iou(logits: Tensor, masks: Tensor) -> float:
    """Return intersection over union of each class, averaged over the classes."""
    predicted = logits.argmax(1)
    ious = []
    for label in range(logits.shape[1]):
        found, there = predicted == label, masks == label
        ious.append((found & there).sum() / (found | there).sum().clamp(min=1))
    return float(torch.stack(ious).mean())
