"""After pytorch/examples, ``imagenet/main.py``: meters, workers, top-5, the best checkpoint, stopped and resumed."""

import os
import random
import shutil
import time
from argparse import Namespace
from enum import Enum

import torch
import torch.nn as nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

from zoo.public import Result
from zoo.public.data import digits


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            shortcut = nn.Conv2d(inplanes, planes, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(planes))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
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
    if args.seed is not None:
        random.seed(args.seed)
        torch.manual_seed(args.seed)
    print(f"=> creating model '{args.arch}'")
    model = resnet_tiny()
    device = torch.device("cpu")
    model = model.to(device)

    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    scheduler = StepLR(optimizer, step_size=3, gamma=0.1)

    if args.resume:
        if os.path.isfile(args.resume):
            print("=> loading checkpoint")
            checkpoint = torch.load(args.resume)
            args.start_epoch = checkpoint["epoch"]
            best_acc1 = checkpoint["best_acc1"]
            model.load_state_dict(checkpoint["state_dict"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            scheduler.load_state_dict(checkpoint["scheduler"])
            print(f"=> loaded checkpoint (epoch {checkpoint['epoch']})")
        else:
            print("=> no checkpoint found")

    train_dataset, val_dataset = DigitFolder("train", True), DigitFolder("test", False)
    train_loader = DataLoader(train_dataset, batch_size=args.batch_size, shuffle=True, num_workers=args.workers)
    val_loader = DataLoader(val_dataset, batch_size=args.batch_size, shuffle=False, num_workers=args.workers)

    with watch(model, optimizer, loader=train_loader, scheduler=scheduler):
        for epoch in range(args.start_epoch, args.epochs):
            train(train_loader, model, criterion, optimizer, epoch, device, args, history)
            acc1 = validate(val_loader, model, criterion, args)
            scheduler.step()
            is_best = acc1 > best_acc1
            best_acc1 = max(acc1, best_acc1)
            save_checkpoint(
                {
                    "epoch": epoch + 1,
                    "arch": args.arch,
                    "state_dict": model.state_dict(),
                    "best_acc1": best_acc1,
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                },
                is_best,
                args.out,
            )
    return model, optimizer, scheduler, best_acc1


def train(train_loader, model, criterion, optimizer, epoch, device, args, history):
    batch_time = AverageMeter("Time", ":6.3f")
    data_time = AverageMeter("Data", ":6.3f")
    losses = AverageMeter("Loss", ":.4e")
    top1 = AverageMeter("Acc@1", ":6.2f")
    top5 = AverageMeter("Acc@5", ":6.2f")
    meters = [batch_time, data_time, losses, top1, top5]
    progress = ProgressMeter(len(train_loader), meters, prefix=f"Epoch: [{epoch}]")

    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        data_time.update(time.time() - end)
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)

        output = model(images)
        loss = criterion(output, target)

        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1[0], images.size(0))
        top5.update(acc5[0], images.size(0))
        history.append(losses.val)

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        batch_time.update(time.time() - end)
        end = time.time()
        if i % args.print_freq == 0:
            progress.display(i + 1)


def validate(val_loader, model, criterion, args):
    batch_time = AverageMeter("Time", ":6.3f", Summary.NONE)
    losses = AverageMeter("Loss", ":.4e", Summary.NONE)
    top1 = AverageMeter("Acc@1", ":6.2f", Summary.AVERAGE)
    top5 = AverageMeter("Acc@5", ":6.2f", Summary.AVERAGE)
    progress = ProgressMeter(len(val_loader), [batch_time, losses, top1, top5], prefix="Test: ")

    model.eval()
    with torch.no_grad():
        end = time.time()
        for i, (images, target) in enumerate(val_loader):
            output = model(images)
            loss = criterion(output, target)
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            losses.update(loss.item(), images.size(0))
            top1.update(acc1[0], images.size(0))
            top5.update(acc5[0], images.size(0))
            batch_time.update(time.time() - end)
            end = time.time()
            if i % args.print_freq == 0:
                progress.display(i + 1)
    progress.display_summary()
    return top1.avg


def save_checkpoint(state, is_best, out):
    filename = os.path.join(out, "checkpoint.pth.tar")
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, os.path.join(out, "model_best.pth.tar"))


class Summary(Enum):
    NONE = 0
    AVERAGE = 1


class AverageMeter:
    def __init__(self, name, fmt=":f", summary_type=Summary.AVERAGE):
        self.name, self.fmt, self.summary_type = name, fmt, summary_type
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return ("{name} {val" + self.fmt + "} ({avg" + self.fmt + "})").format(**self.__dict__)

    def summary(self):
        return f"{self.name} {self.avg:.3f}" if self.summary_type is Summary.AVERAGE else ""


class ProgressMeter:
    def __init__(self, num_batches, meters, prefix=""):
        width = len(str(num_batches))
        self.batch_fmtstr = "[{:" + str(width) + "d}/" + str(num_batches) + "]"
        self.meters, self.prefix = meters, prefix

    def display(self, batch):
        print("\t".join([self.prefix + self.batch_fmtstr.format(batch), *map(str, self.meters)]))

    def display_summary(self):
        print(" ".join([" *", *(meter.summary() for meter in self.meters)]))


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]


def main(watch, seed, folder):
    args = Namespace(
        arch="resnet_tiny", workers=1, epochs=3, start_epoch=0, batch_size=64, lr=0.1, momentum=0.9,
        weight_decay=1e-4, print_freq=10, resume="", seed=seed, out=str(folder),
    )  # fmt: skip
    history = []
    run_training(watch, args, history)
    args.resume, args.epochs = os.path.join(args.out, "checkpoint.pth.tar"), 6
    model, optimizer, scheduler, best_acc1 = run_training(watch, args, history)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return Result("top-1 accuracy", best_acc1.item(), 92, history, objects)
