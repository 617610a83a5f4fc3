"""Denoising diffusion: https://arxiv.org/abs/2006.11239.

Shapes: B batch, C channels, H and W image sides, N time steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.errors import UsageError
from trainwright.models.unet import UNet, UNetConfig

FIRST_BETA, LAST_BETA, PUBLISHED_TIMESTEPS = 1e-4, 0.02, 1000
"""Variances of the noise that each of 1,000 time steps adds. With fewer steps, each adds more."""
MIN_TIMESTEPS = 21
"""With fewer, the last variance would be 1 or more."""
EVALUATION_SEED = 0


class Diffusion(nn.Module):
    """images_BCHW -> the loss: the mean squared error of the noise that it predicts in noisy images.

    Time steps and noise are drawn from torch's generator in training. In evaluation mode they are always the same, so
    that two evaluations can be compared. ``sample`` generates images.
    """

    alphas_cumprod: Tensor  # (N,): the fraction of the variance of the image that is left at each time step

    def __init__(self, options: UNetConfig, timesteps: int) -> None:
        super().__init__()
        self.net = UNet(options)
        betas = torch.linspace(FIRST_BETA, LAST_BETA, timesteps, device="cpu") * (PUBLISHED_TIMESTEPS / timesteps)
        self.register_buffer("alphas_cumprod", (1 - betas).cumprod(0), persistent=False)

    def forward(self, images_BCHW: Tensor, label_B: Tensor | None = None) -> Tensor:  # noqa: ARG002 - other models take it
        """Return the loss, a 0-d tensor: the mean over all values. Labels are not used."""
        device = images_BCHW.device
        generator = None if self.training else torch.Generator(device).manual_seed(EVALUATION_SEED)
        count, batch = len(self.alphas_cumprod), images_BCHW.shape[:1]
        time_B = torch.randint(count, batch, generator=generator, device=device)
        noise_BCHW = torch.randn(images_BCHW.shape, generator=generator, device=device)
        alpha_bar_B111 = self.alphas_cumprod[time_B][:, None, None, None]
        noisy_BCHW = alpha_bar_B111.sqrt() * images_BCHW + (1 - alpha_bar_B111).sqrt() * noise_BCHW
        return F.mse_loss(self.net(noisy_BCHW, time_B).float(), noise_BCHW)

    @torch.no_grad()
    def sample(self, count: int, size: int, generator: torch.Generator | None = None) -> Tensor:
        """Generate images from noise (algorithm 2 of the paper). Call it in evaluation mode.

        Args:
            count: Number of images, B.
            size: Height and width of the images, in pixels.
            generator: Source of the noise; by default torch's generator.

        Returns:
            Images of shape (B, C, size, size).
        """
        device, channels = self.alphas_cumprod.device, self.net.options.channels
        x_BCHW = torch.randn(count, channels, size, size, generator=generator, device=device)
        previous = torch.cat([self.alphas_cumprod.new_ones(1), self.alphas_cumprod[:-1]])
        for time in reversed(range(len(self.alphas_cumprod))):
            alpha_bar = self.alphas_cumprod[time]
            alpha = alpha_bar / previous[time]
            noise = self.net(x_BCHW, torch.full((count,), time, device=device))
            x_BCHW = (x_BCHW - (1 - alpha) / (1 - alpha_bar).sqrt() * noise) / alpha.sqrt()
            if time:
                x_BCHW += (1 - alpha).sqrt() * torch.randn(x_BCHW.shape, generator=generator, device=device)
        return x_BCHW


def diffusion(*, channels: int = 3, width: int = 64, depth: int = 3, timesteps: int = 1000) -> Diffusion:
    """A denoising diffusion model of images with a U-Net: images_BCHW -> the loss (Ho et al. 2020, arXiv 2006.11239).

    It returns its loss, the mean squared error of the predicted noise: use ``loss: of_model``. A prediction of zeros
    has a loss of 1. Images should have a mean of about 0 and a standard deviation of about 1, or lie between -1
    and 1.

    Args:
        channels: Channels of the images.
        width: Channels of the first level of the U-Net; each level below has twice as many.
        depth: How often the sides are halved; 2 to this power divides them.
        timesteps: Number of steps from an image to noise.

    Raises UsageError for a value that cannot be used.
    """
    if timesteps < MIN_TIMESTEPS:
        raise UsageError(
            f"timesteps={timesteps} are too few for the variances of the paper", remedy="try timesteps=100"
        )
    return Diffusion(UNetConfig(channels, channels, width, depth, timed=True), timesteps)
