"""Residual networks for small images: section 4.2 of https://arxiv.org/abs/1512.03385, option A shortcuts.

Shapes: B batch, C channels, H and W image sides (8x8 digits work, the sides are halved twice), K classes.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.errors import UsageError
from trainwright.models.options import require_count


class BasicBlock(nn.Module):
    """relu(shortcut(x) + bn(conv(relu(bn(conv(x)))))).

    If the sides are halved, the shortcut drops every second pixel and adds zero channels.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.stride = stride
        self.added = channels_out - channels_in

    def forward(self, x_BCHW: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x_BCHW)))
        out = self.norm2(self.conv2(out))
        shortcut = x_BCHW[:, :, :: self.stride, :: self.stride]
        before = self.added // 2
        return F.relu(out + F.pad(shortcut, (0, 0, 0, 0, before, self.added - before)))


class ResNet(nn.Module):
    """x_BCHW -> logits_BK: a stem, three stages of n blocks of two convolutions, and a linear head; depth is 6 n + 2.

    ``blocks`` is the list that activation checkpointing and sharding wrap.
    """

    def __init__(self, depth: int, classes: int, channels: int, width: int) -> None:
        super().__init__()
        require_count("depth", depth, 8)
        require_count("classes", classes)
        require_count("channels", channels)
        require_count("width", width)
        if (depth - 2) % 6:
            below = depth - (depth - 2) % 6
            raise UsageError(f"depth must be 6 n + 2; got {depth}", remedy=f"try {below} or {below + 6}")
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        widths = [width * 2**stage for stage in range(3) for _ in range((depth - 2) // 6)]
        befores = [width, *widths[:-1]]
        self.blocks = nn.ModuleList(
            BasicBlock(before, after, stride=1 if before == after else 2) for before, after in zip(befores, widths)
        )
        self.head = nn.Linear(widths[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # https://arxiv.org/abs/1502.01852
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x_BCHW)))
        for block in self.blocks:
            x = block(x)
        logits_BK: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits_BK


def resnet(*, depth: int = 20, classes: int = 10, channels: int = 3, width: int = 16) -> ResNet:
    """A ResNet for small images: pixels_BCHW -> logits_BK (He et al. 2015, arXiv 1512.03385, 4.2).

    Args:
        depth: Number of layers with weights, 6 n + 2: 20, 32, 44, 56, 110.
        classes: Number of outputs. Taken from the training set where a recipe leaves it out.
        channels: Channels of the input.
        width: Channels of the first stage; the second and third have twice and four times as many.

    Raises UsageError for a depth that is not 6 n + 2.
    """
    return ResNet(depth, classes, channels, width)
