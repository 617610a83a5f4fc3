"""After pytorch/examples, ``vae/main.py``: summed BCE and KL, reconstructions and samples as pictures each epoch."""

import argparse

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from zoo.public import Result
from zoo.public.data import digits, save_image


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 256)
        self.fc21 = nn.Linear(256, 10)
        self.fc22 = nn.Linear(256, 10)
        self.fc3 = nn.Linear(10, 256)
        self.fc4 = nn.Linear(256, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        h3 = F.relu(self.fc3(z))
        return torch.sigmoid(self.fc4(h3))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 64))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD


def main(watch, seed, folder):
    parser = argparse.ArgumentParser(description="VAE MNIST Example")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N")
    parser.add_argument("--epochs", type=int, default=40, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--log-interval", type=int, default=10, metavar="N")
    args = parser.parse_args(["--seed", str(seed)])
    torch.manual_seed(args.seed)
    device = torch.device("cpu")

    def loader(split, shuffle):
        x, y = digits(split)
        dataset = TensorDataset(torch.from_numpy(x)[:, None], torch.from_numpy(y))
        return DataLoader(dataset, batch_size=args.batch_size, shuffle=shuffle)

    train_loader, test_loader = loader("train", True), loader("test", False)
    model = VAE().to(device)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    history = []

    def train(epoch):
        model.train()
        train_loss = 0
        for batch_idx, (data, _) in enumerate(train_loader):
            data = data.to(device)
            optimizer.zero_grad()
            recon_batch, mu, logvar = model(data)
            loss = loss_function(recon_batch, data, mu, logvar)
            loss.backward()
            train_loss += loss.item()
            optimizer.step()
            history.append(loss.item() / len(data))
            if batch_idx % args.log_interval == 0:
                done, total = batch_idx * len(data), len(train_loader.dataset)
                percent = 100.0 * batch_idx / len(train_loader)
                print(f"Train Epoch: {epoch} [{done}/{total} ({percent:.0f}%)]\tLoss: {loss.item() / len(data):.6f}")
        print(f"====> Epoch: {epoch} Average loss: {train_loss / len(train_loader.dataset):.4f}")

    def test(epoch):
        model.eval()
        test_loss = 0
        with torch.no_grad():
            for i, (data, _) in enumerate(test_loader):
                data = data.to(device)
                recon_batch, mu, logvar = model(data)
                test_loss += loss_function(recon_batch, data, mu, logvar).item()
                if i == 0:
                    n = min(data.size(0), 8)
                    comparison = torch.cat([data[:n], recon_batch.view(args.batch_size, 1, 8, 8)[:n]])
                    save_image(comparison.cpu(), folder / f"reconstruction_{epoch}.png", nrow=n)
        test_loss /= len(test_loader.dataset)
        print(f"====> Test set loss: {test_loss:.4f}")
        return test_loss

    with watch(model, optimizer, loader=train_loader):
        for epoch in range(1, args.epochs + 1):
            train(epoch)
            test_loss = test(epoch)
            with torch.no_grad():
                sample = torch.randn(64, 10).to(device)
                sample = model.decode(sample).cpu()
                save_image(sample.view(64, 1, 8, 8), folder / f"sample_{epoch}.png")
    objects = {"model": model, "optimizer": optimizer}
    return Result("test loss", test_loss, 27, history, objects, higher_is_better=False)
