"""U-Nets for segmentation (https://arxiv.org/abs/1505.04597), with padded convolutions and GroupNorm.

Shapes: B batch, C channels, H and W image sides, K outputs per pixel, O channels out.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.errors import UsageError
from trainwright.models.options import require_count

MAX_GROUPS = 8
"""Maximum number of groups of each GroupNorm; fewer if they do not divide the channels."""


class TwoConvs(nn.Module):
    """x_BCHW -> out_BOHW: two 3x3 convolutions, each with GroupNorm and SiLU."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        groups = math.gcd(MAX_GROUPS, channels_out)
        self.norm1, self.norm2 = (nn.GroupNorm(groups, channels_out) for _ in range(2))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = F.silu(self.norm1(self.conv1(x_BCHW)))
        return F.silu(self.norm2(self.conv2(x_BCHW)))


class UNet(nn.Module):
    """x_BCHW -> out_BKHW.

    ``blocks``, the list that activation checkpointing and sharding wrap, has ``depth`` blocks down, one at the bottom,
    and ``depth`` blocks up.
    """

    def __init__(self, classes: int, channels: int, width: int, depth: int) -> None:
        super().__init__()
        require_count("classes", classes)
        require_count("channels", channels)
        require_count("width", width)
        require_count("depth", depth)
        self.depth = depth
        widths = [width * 2**level for level in range(depth + 1)]
        down = list(zip([channels, *widths], widths))
        up = [(2 * width, width) for width in reversed(widths[:-1])]
        self.blocks = nn.ModuleList(TwoConvs(before, after) for before, after in (*down, *up))
        self.upsample = nn.ModuleList(nn.ConvTranspose2d(before, after, 2, stride=2) for before, after in up)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        depth = self.depth
        if any(side % 2**depth for side in x_BCHW.shape[-2:]):
            raise UsageError(
                f"images of {' x '.join(map(str, x_BCHW.shape[-2:]))} pixels cannot be halved {depth} times",
                remedy=f"pad them to a multiple of {2**depth}, or take a smaller depth",
            )
        skips = []
        for block in self.blocks[:depth]:
            x_BCHW = block(x_BCHW)
            skips.append(x_BCHW)
            x_BCHW = F.max_pool2d(x_BCHW, 2)
        x_BCHW = self.blocks[depth](x_BCHW)
        for upsample, block in zip(self.upsample, self.blocks[depth + 1 :]):
            x_BCHW = block(torch.cat([skips.pop(), upsample(x_BCHW)], dim=1))
        out_BKHW: Tensor = self.head(x_BCHW)
        return out_BKHW


def unet(*, classes: int, channels: int = 3, width: int = 64, depth: int = 4) -> UNet:
    """A U-Net for segmentation: pixels_BCHW -> logits_BKHW (Ronneberger et al. 2015, arXiv 1505.04597).

    Convolutions are padded, so the output has the size of the input, and GroupNorm follows each.

    Args:
        classes: Number of outputs per pixel. Taken from the training set where a recipe leaves it out.
        channels: Channels of the images.
        width: Channels of the first level; each level below has twice as many.
        depth: How often the sides are halved; the sides must be multiples of 2 ** ``depth``.

    Raises UsageError for a value that cannot be used.
    """
    return UNet(classes, channels, width, depth)
