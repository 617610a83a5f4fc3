"""After pytorch/examples, ``imagenet/main.py``: meters, workers, top-5, the best checkpoint, stopped and resumed."""

import random
import shutil
import time
from argparse import Namespace

import torch
import torch.nn as nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

from zoo.public import Result
from zoo.public.data import digits


class BasicBlock(nn.Module):
    def __init__(self, a, b, stride=1):
        super().__init__()
        first, second = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.Conv2d(b, b, 3, 1, 1, bias=False)
        self.body = nn.Sequential(first, nn.BatchNorm2d(b), nn.ReLU(inplace=True), second, nn.BatchNorm2d(b))
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Identity()
        if stride != 1 or a != b:
            self.downsample = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b))

    def forward(self, x):
        out = self.body(x)
        out += self.downsample(x)
        return self.relu(out)


def resnet_tiny(num_classes=10):
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, 1, 1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(inplace=True),
        BasicBlock(12, 12),
        BasicBlock(12, 24, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, num_classes),
    )


class DigitFolder(Dataset):
    def __init__(self, split, augment):
        self.samples, self.targets = digits(split)
        self.augment = augment

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        image = torch.from_numpy(self.samples[index])[None]
        if self.augment:  # a random crop of the padded picture
            padded = nn.functional.pad(image, (1, 1, 1, 1))
            top, left = random.randint(0, 2), random.randint(0, 2)
            image = padded[:, top : top + 8, left : left + 8]
        return (image - 0.3053) / 0.3760, int(self.targets[index])


def run_training(watch, args, history):
    best_acc1 = 0
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    print(f"=> creating model '{args.arch}'")
    model = resnet_tiny().to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    decayed = {"momentum": args.momentum, "weight_decay": args.weight_decay}
    optimizer = torch.optim.SGD(model.parameters(), args.lr, **decayed)
    scheduler = StepLR(optimizer, step_size=3, gamma=0.1)

    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        for part, key in ((model, "state_dict"), (optimizer, "optimizer"), (scheduler, "scheduler")):
            part.load_state_dict(checkpoint[key])
        args.start_epoch, best_acc1 = checkpoint["epoch"], checkpoint["best_acc1"]
        print(f"=> loaded checkpoint (epoch {args.start_epoch})")

    train_loader, val_loader = (
        DataLoader(dataset, batch_size=args.batch_size, shuffle=dataset.augment, num_workers=args.workers)
        for dataset in (DigitFolder("train", True), DigitFolder("test", False))
    )

    with watch(model, optimizer, loader=train_loader, scheduler=scheduler):
        for epoch in range(args.start_epoch, args.epochs):
            train(train_loader, model, criterion, optimizer, epoch, device, args, history)
            acc1 = validate(val_loader, model, criterion, args)
            scheduler.step()
            is_best, best_acc1 = acc1 > best_acc1, max(acc1, best_acc1)
            state = {"epoch": epoch + 1, "arch": args.arch, "best_acc1": best_acc1}
            state |= {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
            save_checkpoint(state | {"scheduler": scheduler.state_dict()}, is_best, args.out)
    return model, optimizer, scheduler, best_acc1


def train(train_loader, model, criterion, optimizer, epoch, device, args, history):
    progress = Progress(len(train_loader), ["Time", "Data", "Loss", "Acc@1", "Acc@5"], f"Epoch: [{epoch}]")
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        progress.update(Data=time.time() - end)
        images, target = (part.to(device, non_blocking=True) for part in (images, target))
        output = model(images)
        loss = criterion(output, target)
        progress.measure(output, target, loss)
        history.append(progress.meters["Loss"].val)

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        progress.update(Time=time.time() - end)
        end = time.time()
        if i % args.print_freq == 0:
            progress.display(i + 1)


def validate(val_loader, model, criterion, args):
    progress = Progress(len(val_loader), ["Time", "Loss", "Acc@1", "Acc@5"], "Test: ")
    model.eval()
    with torch.no_grad():
        end = time.time()
        for i, (images, target) in enumerate(val_loader):
            output = model(images)
            progress.measure(output, target, criterion(output, target))
            progress.update(Time=time.time() - end)
            end = time.time()
            if i % args.print_freq == 0:
                progress.display(i + 1)
    best = {name: progress.meters[name].avg.item() for name in ("Acc@1", "Acc@5")}
    print(" *", *(f"{name} {average:.3f}" for name, average in best.items()))
    return progress.meters["Acc@1"].avg


def save_checkpoint(state, is_best, out):
    torch.save(state, out / "checkpoint.pth.tar")
    if is_best:
        shutil.copyfile(out / "checkpoint.pth.tar", out / "model_best.pth.tar")


class AverageMeter:
    """The last value and the average of all, weighted."""

    def __init__(self):
        self.val = self.total = self.weight = 0

    @property
    def avg(self):
        return self.total / max(self.weight, 1)

    def update(self, val, n=1):
        self.val, self.total, self.weight = val, self.total + val * n, self.weight + n


class Progress:
    def __init__(self, num_batches, names, prefix):
        self.num_batches, self.prefix = num_batches, prefix
        self.meters = {name: AverageMeter() for name in names}

    def update(self, n=1, **values):
        for name, value in values.items():
            self.meters[name].update(value, n)

    def measure(self, output, target, loss):
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        self.update(len(target), Loss=loss.item())
        self.update(len(target), **{"Acc@1": acc1, "Acc@5": acc5})

    def display(self, batch):
        shown = [f"{name} {float(m.val):6.3f} ({float(m.avg):6.3f})" for name, m in self.meters.items()]
        print("\t".join([f"{self.prefix}[{batch:>{len(str(self.num_batches))}}/{self.num_batches}]", *shown]))


@torch.no_grad()
def accuracy(output, target, topk=(1,)):
    """The share of rows whose label is among the k largest outputs, in percent, as tensors."""
    hits = output.topk(max(topk), dim=1).indices == target[:, None]
    return [100.0 * hits[:, :k].any(dim=1).float().mean() for k in topk]


def main(watch, seed, folder):
    args = Namespace(
        arch="resnet_tiny", workers=1, epochs=3, start_epoch=0, batch_size=64, lr=0.1, momentum=0.9,
        weight_decay=1e-4, print_freq=10, resume="", seed=seed, out=folder,
    )  # fmt: skip
    history = []
    run_training(watch, args, history)
    args.resume, args.epochs = folder / "checkpoint.pth.tar", 6
    model, optimizer, scheduler, best_acc1 = run_training(watch, args, history)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return Result("top-1 accuracy", best_acc1.item(), 92, history, objects)
