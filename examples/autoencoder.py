"""A variational autoencoder (Kingma & Welling 2014): the parts of a loss are logged apart, as metrics of the loss."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import trainwright as tw


class Autoencoder(nn.Module):
    """Gives the reconstruction, and mean and log-variance of the code."""

    def __init__(self, code: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2 * code))
        self.decoder = nn.Sequential(nn.Linear(code, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encoder(image).chunk(2, dim=1)
        code = mean + (0.5 * log_var).exp() * torch.randn_like(mean) if self.training else mean
        return self.decoder(code), mean, log_var


def digits() -> Tensor:
    """The images of scikit-learn, (1797, 64), between 0 and 1."""
    return torch.tensor(load_digits().data, dtype=torch.float32) / 16


def loss(model: nn.Module, batch: tuple[Tensor]) -> tw.Loss:
    (image,) = batch
    output, mean, log_var = model(image)
    reconstruction = F.binary_cross_entropy_with_logits(output, image, reduction="sum")
    kl = 0.5 * (log_var.exp() + mean**2 - 1 - log_var).sum()
    return tw.Loss(reconstruction + kl, float(len(image)), {"reconstruction": reconstruction, "kl": kl})


def main(steps: int = 300, resume: Path | None = None) -> tw.Result:
    torch.manual_seed(0)
    return tw.fit(
        Autoencoder(), (digits(),), loss, batch=64, steps=steps, lr=3e-3, schedule="cosine", clip=1.0, resume=resume
    )


if __name__ == "__main__":
    main()
