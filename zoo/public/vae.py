"""After pytorch/examples, ``vae/main.py``: summed BCE and KL, reconstructions and samples as pictures each epoch."""

import argparse

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from zoo.public import Result
from zoo.public.data import digits, save_image

PIXELS = 64


class VAE(nn.Module):
    def __init__(self, hidden=256, latent=10):
        super().__init__()
        self.latent = latent
        self.encoder = nn.Linear(PIXELS, hidden)
        self.to_mu, self.to_logvar = nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, PIXELS), nn.Sigmoid())

    def encode(self, x):
        h = self.encoder(x).relu()
        return self.to_mu(h), self.to_logvar(h)

    def decode(self, z):
        return self.decoder(z)

    def forward(self, pictures):
        mu, logvar = self.encode(pictures.flatten(1))
        z = mu + torch.randn_like(mu) * (logvar / 2).exp()
        return self.decode(z), mu, logvar


def loss_function(recon, pictures, mu, logvar):
    bce = F.binary_cross_entropy(recon, pictures.flatten(1), reduction="sum")
    kld = 0.5 * (mu.square() + logvar.exp() - logvar - 1).sum()
    return bce + kld


def train(epoch, model, loader, optimizer, args, history):
    model.train()
    train_loss = 0
    for batch_idx, (data, _) in enumerate(loader):
        optimizer.zero_grad()
        recon, mu, logvar = model(data)
        loss = loss_function(recon, data, mu, logvar)
        loss.backward()
        optimizer.step()
        train_loss += loss.item()
        history.append(loss.item() / len(data))
        if batch_idx % args.log_interval == 0:
            where = f"[{batch_idx * args.batch_size}/{len(loader.dataset)} ({100 * batch_idx / len(loader):.0f}%)]"
            print(f"Train Epoch: {epoch} {where}\tLoss: {history[-1]:.6f}")
    print(f"====> Epoch: {epoch} Average loss: {train_loss / len(loader.dataset):.4f}")


@torch.no_grad()
def test(epoch, model, loader, folder):
    model.eval()
    test_loss = 0
    for i, (data, _) in enumerate(loader):
        recon, mu, logvar = model(data)
        test_loss += loss_function(recon, data, mu, logvar).item()
        if i == 0:
            pair = torch.cat([data[:8], recon[:8].view(-1, 1, 8, 8)])
            save_image(pair, folder / f"reconstruction_{epoch}.png", nrow=8)
    test_loss /= len(loader.dataset)
    print(f"====> Test set loss: {test_loss:.4f}")
    return test_loss


def main(watch, seed, folder):
    parser = argparse.ArgumentParser(description="VAE of digits")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=10)
    args = parser.parse_args(["--seed", str(seed)])
    torch.manual_seed(args.seed)
    loaders = {}
    for split in ("train", "test"):
        x, y = digits(split)
        dataset = TensorDataset(torch.from_numpy(x)[:, None], torch.from_numpy(y))
        loaders[split] = DataLoader(dataset, batch_size=args.batch_size, shuffle=split == "train")
    model = VAE()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    history = []
    with watch(model, optimizer, loader=loaders["train"]):
        for epoch in range(1, args.epochs + 1):
            train(epoch, model, loaders["train"], optimizer, args, history)
            test_loss = test(epoch, model, loaders["test"], folder)
            with torch.no_grad():
                drawn = model.decode(torch.randn(64, model.latent))
            save_image(drawn.view(64, 1, 8, 8), folder / f"sample_{epoch}.png")
    objects = {"model": model, "optimizer": optimizer}
    return Result("test loss", test_loss, 27, history, objects, higher_is_better=False)
