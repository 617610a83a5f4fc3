"""After pytorch/examples, ``mnist/main.py``: train, test, StepLR, and the weights saved at the end."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

from zoo.public import Result
from zoo.public.data import digits


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(256, 128), nn.Linear(128, 10)

    def forward(self, x):
        x = self.conv2(self.conv1(x).relu()).relu()
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(self.fc1(x).relu())
        return F.log_softmax(self.fc2(x), dim=1)


class Digits(Dataset):
    def __init__(self, split, transform):
        (self.data, self.targets), self.transform = digits(split), transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.transform(torch.from_numpy(self.data[index])[None]), int(self.targets[index])


def normalize(image):
    return (image - 0.3053) / 0.3760


def train(args, model, device, train_loader, optimizer, epoch, history):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        history.append(loss.item())
        if batch_idx % args.log_interval == 0:
            percent = 100.0 * batch_idx / len(train_loader)
            where = f"[{batch_idx * len(data)}/{len(train_loader.dataset)} ({percent:.0f}%)]"
            print(f"Train Epoch: {epoch} {where}\tLoss: {loss.item():.6f}")


def test(model, device, test_loader):
    model.eval()
    test_loss = correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data.to(device)).cpu()
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += int((output.argmax(1) == target).sum())
    total = len(test_loader.dataset)
    test_loss /= total
    percent = 100.0 * correct / total
    print(f"\nTest set: Average loss: {test_loss:.4f}, Accuracy: {correct}/{total} ({percent:.0f}%)\n")
    return percent


def main(watch, seed, folder):
    parser = argparse.ArgumentParser(description="Digits")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--test-batch-size", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7, help="factor of the learning rate after each epoch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--save-model", action="store_true")
    args = parser.parse_args(["--seed", str(seed), "--save-model"])
    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    train_loader = DataLoader(Digits("train", normalize), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(Digits("test", normalize), batch_size=args.test_batch_size)
    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    history = []
    with watch(model, optimizer, loader=train_loader, scheduler=scheduler):
        for epoch in range(1, args.epochs + 1):
            train(args, model, device, train_loader, optimizer, epoch, history)
            accuracy = test(model, device, test_loader)
            scheduler.step()
    if args.save_model:
        torch.save(model.state_dict(), folder / "mnist_cnn.pt")
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return Result("test accuracy", accuracy, 93, history, objects)
