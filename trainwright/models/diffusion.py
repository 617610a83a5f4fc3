"""Denoising diffusion: https://arxiv.org/abs/2006.11239.

Shapes: B batch, C channels, H and W image sides, N times.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.errors import UsageError
from trainwright.models.unet import UNet, UNetConfig

FIRST_BETA, LAST_BETA, PUBLISHED_TIMES = 1e-4, 0.02, 1000
"""Variances of the noise that each of 1,000 times adds; of fewer times each adds more."""
EVALUATION_SEED = 0


class Diffusion(nn.Module):
    """images_BCHW -> the loss: the mean squared error of the noise that it predicts in noisy images.

    Times and noise are drawn from torch's generator in training. In evaluation mode they are always the same, so that
    two evaluations can be compared. ``sample`` generates images.
    """

    kept: Tensor  # (N,): the fraction of the variance of the image that is left at each time

    def __init__(self, options: UNetConfig, times: int) -> None:
        super().__init__()
        self.net = UNet(options)
        betas = torch.linspace(FIRST_BETA, LAST_BETA, times, device="cpu") * (PUBLISHED_TIMES / times)
        self.register_buffer("kept", (1 - betas).cumprod(0), persistent=False)

    def forward(self, images_BCHW: Tensor, label_B: Tensor | None = None) -> Tensor:
        """Returns the loss, a mean over all values. Labels are not used."""
        device, draw = images_BCHW.device, None
        if not self.training:
            draw = torch.Generator(device).manual_seed(EVALUATION_SEED)
        time_B = torch.randint(len(self.kept), images_BCHW.shape[:1], generator=draw, device=device)
        noise_BCHW = torch.randn(images_BCHW.shape, generator=draw, device=device)
        kept_B111 = self.kept[time_B][:, None, None, None]
        noisy_BCHW = kept_B111.sqrt() * images_BCHW + (1 - kept_B111).sqrt() * noise_BCHW
        return F.mse_loss(self.net(noisy_BCHW, time_B).float(), noise_BCHW)

    @torch.no_grad()
    def sample(self, count: int, size: int, generator: torch.Generator | None = None) -> Tensor:
        """Generates ``count`` images of ``size`` x ``size`` pixels from noise (algorithm 2 of the paper)."""
        device, channels = self.kept.device, self.net.options.channels
        x_BCHW = torch.randn(count, channels, size, size, generator=generator, device=device)
        before = torch.cat([self.kept.new_ones(1), self.kept[:-1]])
        for time in reversed(range(len(self.kept))):
            alpha, kept = self.kept[time] / before[time], self.kept[time]
            noise = self.net(x_BCHW, torch.full((count,), time, device=device))
            x_BCHW = (x_BCHW - (1 - alpha) / (1 - kept).sqrt() * noise) / alpha.sqrt()
            if time:
                x_BCHW += (1 - alpha).sqrt() * torch.randn(x_BCHW.shape, generator=generator, device=device)
        return x_BCHW


def diffusion(*, channels: int = 3, width: int = 64, depth: int = 3, times: int = 1000) -> Diffusion:
    """A denoising diffusion model of images with a U-Net: images_BCHW -> the loss (Ho et al. 2020, arXiv 2006.11239).

    It returns its loss, the mean squared error of the predicted noise: use ``loss: of_model``. The prediction of no
    noise has a loss of 1. Images should have a mean of about 0 and a standard deviation of about 1, or lie between -1
    and 1.

    Args:
        channels: Channels of the images.
        width: Channels of the first level of the U-Net; each level below has twice as many.
        depth: How often the sides are halved; 2 to this power divides them.
        times: Steps from an image to noise.

    Raises UsageError for a value that cannot be used.
    """
    if times < 21:  # below, the last variance would be 1 or more
        raise UsageError(f"times={times} are too few for the variances of the paper", remedy="try times=100")
    return Diffusion(UNetConfig(channels, channels, width, depth, timed=True), times)
