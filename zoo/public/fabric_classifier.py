"""After Lightning's ``fabric/image_classifier/train_fabric.py``: Fabric instead of a Trainer, torchmetrics."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from lightning.fabric import Fabric, seed_everything
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import Accuracy

from zoo.public import Result
from zoo.public.data import digits


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 24, 3, 1)
        self.conv2 = nn.Conv2d(24, 48, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(48 * 4, 96)
        self.fc2 = nn.Linear(96, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def main(watch, seed, folder):
    parser = argparse.ArgumentParser(description="Fabric MNIST Example")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N")
    parser.add_argument("--epochs", type=int, default=14, metavar="N")
    parser.add_argument("--lr", type=float, default=1.0, metavar="LR")
    parser.add_argument("--gamma", type=float, default=0.7, metavar="M")
    parser.add_argument("--dry-run", action="store_true", default=False)
    parser.add_argument("--log-interval", type=int, default=10, metavar="N")
    parser.add_argument("--save-model", action="store_true", default=False)
    hparams = parser.parse_args(["--save-model"])

    fabric = Fabric(accelerator="cpu", devices=1)
    seed_everything(1 + seed, verbose=False)

    with fabric.rank_zero_first(local=False):
        train_dataset, test_dataset = (
            TensorDataset((torch.from_numpy(x)[:, None] - 0.3053) / 0.376, torch.from_numpy(y))
            for x, y in (digits("train"), digits("test"))
        )
    train_loader = DataLoader(train_dataset, batch_size=hparams.batch_size, shuffle=True)
    test_loader = DataLoader(test_dataset, batch_size=hparams.batch_size)
    train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)

    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=hparams.lr)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = StepLR(optimizer, step_size=1, gamma=hparams.gamma)
    test_acc = Accuracy(task="multiclass", num_classes=10).to(fabric.device)
    history = []

    with watch(model, optimizer, loader=train_loader, scheduler=scheduler):
        for epoch in range(1, hparams.epochs + 1):
            model.train()
            for batch_idx, (data, target) in enumerate(train_loader):
                optimizer.zero_grad()
                output = model(data)
                loss = F.nll_loss(output, target)
                fabric.backward(loss)
                optimizer.step()
                history.append(loss.item())
                if (batch_idx == 0) or ((batch_idx + 1) % hparams.log_interval == 0):
                    print(
                        f"Train Epoch: {epoch} [{batch_idx * len(data)}/{len(train_loader.dataset)}"
                        f" ({100.0 * batch_idx / len(train_loader):.0f}%)]\tLoss: {loss.item():.6f}"
                    )
                    if hparams.dry_run:
                        break
            scheduler.step()

            model.eval()
            test_loss = 0
            with torch.no_grad():
                for data, target in test_loader:
                    output = model(data)
                    test_loss += F.nll_loss(output, target, reduction="sum").item()
                    test_acc(output, target)
                    if hparams.dry_run:
                        break
            test_loss = fabric.all_gather(test_loss).sum() / len(test_loader.dataset)
            accuracy = 100 * test_acc.compute()
            print(f"\nTest set: Average loss: {test_loss:.4f}, Accuracy: ({accuracy:.0f}%)\n")
            test_acc.reset()
            if hparams.dry_run:
                break
    if hparams.save_model:
        fabric.save(folder / "mnist_cnn.pt", model.state_dict())
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return Result("test accuracy", accuracy.item(), 93, history, objects)
