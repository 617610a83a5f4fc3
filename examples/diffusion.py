"""A diffusion model (DDPM, Ho et al. 2020) of scikit-learn's digits: the loss draws the time and the noise."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import trainwright as tw

TIMES = 100
KEPT = (1 - torch.linspace(1e-3, 0.2, TIMES)).cumprod(0)
"""The share of the image, squared, that is left at each time."""


class Denoiser(nn.Module):
    """Says which noise is in an image (B, 64) at time (B,)."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.time = nn.Embedding(TIMES, width)
        self.first, self.second, self.last = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 64)

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        hidden = F.silu(self.first(noisy) + self.time(time))
        return self.last(F.silu(self.second(hidden)))


def digits() -> Tensor:
    """Images (1797, 64) between -1 and 1."""
    return torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1


def loss(model: nn.Module, batch: tuple[Tensor]) -> tw.Loss:
    (image,) = batch
    time, noise = torch.randint(TIMES, (len(image),), device=image.device), torch.randn_like(image)
    kept = KEPT.to(image.device)[time, None]
    noisy = kept.sqrt() * image + (1 - kept).sqrt() * noise
    return tw.Loss(F.mse_loss(model(noisy, time), noise, reduction="sum"), float(noise.numel()))


@torch.no_grad()
def sample(model: nn.Module, count: int) -> Tensor:
    """New images, from noise."""
    device = next(model.parameters()).device
    image = torch.randn(count, 64, device=device)
    for time in reversed(range(TIMES)):
        kept, before = KEPT[time], KEPT[time - 1] if time else torch.ones(())
        share = kept / before  # what one step of time leaves
        noise = model(image, torch.full((count,), time, device=device))
        image = (image - (1 - share) / (1 - kept).sqrt() * noise) / share.sqrt()
        if time:
            image += (1 - share).sqrt() * torch.randn_like(image)
    return image


def main(steps: int = 500, resume: Path | None = None) -> tw.Result:
    torch.manual_seed(0)
    result = tw.fit(
        Denoiser(), (digits(),), loss, batch=128, steps=steps, lr=3e-3, schedule="cosine", clip=1.0, resume=resume
    )
    sample(result.state.model, 4)
    return result


if __name__ == "__main__":
    main()
