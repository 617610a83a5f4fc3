"""A variational autoencoder of small pictures: a warm-up of its KL term, gradients accumulated over two halves."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from zoo.further.worlds import letters
from zoo.hosts.report import Report, Watch


class VAE(nn.Module):
    def __init__(self, width: int = 96, size: int = 10) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.mean, self.log_var = nn.Linear(width, size), nn.Linear(width, size)
        self.decoder = nn.Sequential(nn.Linear(size, width), nn.ReLU(), nn.Linear(width, 64))

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.encoder(x)
        return self.mean(h), self.log_var(h).clamp(-8.0, 4.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encode(x)
        z = mean + torch.exp(0.5 * log_var) * torch.randn_like(mean)
        return self.decoder(z), mean, log_var


def losses_of(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Reconstruction and KL divergence of a sample, on the mean over the batch."""
    logits, mean, log_var = model(x)
    seen = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
    kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(dim=1).mean()
    return seen, kl


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader) -> tuple[float, float]:
    model.eval()
    bound, right, count = 0.0, 0.0, 0
    for (x,) in batches:
        seen, kl = losses_of(model, x)
        bound += (seen + kl).item() * len(x)
        mean, _ = model.encode(x)
        right += ((model.decoder(mean) > 0) == (x > 0.5)).float().mean(dim=1).sum().item()
        count += len(x)
    model.train()
    return bound / count, right / count


def train(watch: Watch, seed: int, epochs: int = 12) -> Report:
    torch.manual_seed(seed)
    x = letters(seed, 1200)
    batches = DataLoader(TensorDataset(x[:1024]), batch_size=128, shuffle=True)
    held_out = DataLoader(TensorDataset(x[1024:]), batch_size=100)

    model = VAE()
    optimizer = Adam(model.parameters(), lr=4e-3)
    losses, shown, step = [], (0.0, 0.0), 0
    with watch(model, optimizer, loader=batches):
        for _ in range(epochs):
            model.train()
            for (batch,) in batches:
                beta = min(1.0, (step + 1) / 24)
                optimizer.zero_grad()
                total = 0.0
                for half in batch.chunk(2):
                    seen, kl = losses_of(model, half)
                    loss = (seen + beta * kl) / 2
                    loss.backward()
                    total += loss.item()
                optimizer.step()
                step += 1
                losses.append(total)
            shown = evaluate(model, held_out)
    return Report(model, {"loss": shown[0], "right": shown[1]}, losses)
