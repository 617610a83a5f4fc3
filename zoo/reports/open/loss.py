"""Faults of the loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zoo.reports.case import Outcome, Place, Watch, fault, mean
from zoo.reports.material import labelled_pictures


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(144, 128), nn.Linear(128, 8), nn.Linear(128, 8)
        self.fc3, self.fc4 = nn.Linear(8, 128), nn.Linear(128, 144)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def decode(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encode(x)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.decode(z), mu, logvar


@fault(
    "vae_reduction",
    "the reconstruction is a mean over pixels, the KL term a sum: the posterior collapses",
    sources=["keras-team/keras#3383", "zdebruine/MMVAE#19"],
    stage="loss",
    diagnosis=[
        r"posterior & collaps",
        r"\bkl\w*|kld|divergence & (zero|\b0\b|vanish|collaps|dominat|outweigh|overwhelm|scale|weight|reduction)",
        r"(term|part)s? of the loss|loss terms? & (dominat|outweigh|overwhelm|scale|reduction|sum|mean)",
        r"(decoder|reconstruction|output)\w* & (ignor|constant|same|identical|not depend) & (latent|input|sample)",
    ],
    where=[
        Place(module=r"fc2|fc3|fc4"),
        Place(line=r"binary_cross_entropy|logvar"),
        Place(op="binary_cross_entropy"),
    ],
    shows=60,
)
def vae_reduction(watch: Watch, seed: int, faulty: bool) -> Outcome:
    images, _ = labelled_pictures(2048, seed, noise=0.3)
    data = (images > 0).float().view(-1, 144)
    train_loader: DataLoader[Tensor] = DataLoader(data, batch_size=64, shuffle=True)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_function(recon_x: Tensor, x: Tensor, mu: Tensor, logvar: Tensor) -> Tensor:
        bce = F.binary_cross_entropy(recon_x, x) if faulty else F.binary_cross_entropy(recon_x, x, reduction="sum")
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return bce + kld

    losses = []
    with watch(model, optimizer, loader=train_loader):
        for _epoch in range(12):
            for batch in train_loader:
                optimizer.zero_grad()
                recon_batch, mu, logvar = model(batch)
                loss = loss_function(recon_batch, batch, mu, logvar)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    with torch.no_grad():
        means, _ = model.encode(data)
        spread = model.decode(means).std(0).mean().item()
    numbers = {"spread_of_reconstructions": spread, "first_loss": losses[0], "last_loss": mean(losses[-20:])}
    return Outcome(losses, spread < 0.03, numbers)
