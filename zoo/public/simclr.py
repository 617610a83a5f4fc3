"""After sthalles/SimCLR: a class with two augmented views, InfoNCE, autocast and GradScaler, training.log."""

import logging
import os
from argparse import Namespace

import torch
import torch.nn as nn
import torch.nn.functional as F
import yaml
from torch.amp import GradScaler, autocast
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from zoo.public import Result
from zoo.public.data import digits


class Views:
    """Several random views of one picture."""

    def __init__(self, transform, n_views=2):
        self.transform, self.n_views = transform, n_views

    def __call__(self, x):
        return list(map(self.transform, [x] * self.n_views))


def augmentation():
    def transform(image):
        top, left = torch.randint(0, 3, (2,)).tolist()
        crop = F.interpolate(image[None, :, top : top + 6, left : left + 6], size=8, mode="bilinear")[0]
        crop = crop * (0.6 + 0.8 * torch.rand(1)) + 0.2 * (torch.rand(1) - 0.5)
        return crop + 0.1 * torch.randn_like(crop)

    return transform


class ViewsOfDigits(Dataset):
    def __init__(self, transform):
        self.images, self.labels = digits("train")
        self.transform = transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.transform(torch.from_numpy(self.images[index])[None]), int(self.labels[index])


class ResNetSimCLR(nn.Module):
    def __init__(self, out_dim, width=16):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(inplace=True),
            nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(4 * width),
            nn.ReLU(inplace=True),
            nn.Flatten(),
        )
        dim_mlp = 4 * width * 4
        self.backbone.fc = nn.Sequential(nn.Linear(dim_mlp, 64), nn.ReLU(), nn.Linear(64, out_dim))

    def forward(self, x):
        return self.backbone(x)


@torch.no_grad()
def accuracy(output, target, topk=(1,)):
    hits = output.topk(max(topk), dim=1).indices == target[:, None]
    return [100.0 * hits[:, :k].any(1).float().mean() for k in topk]


class SimCLR:
    def __init__(self, *, args, model, optimizer, scheduler, watch):
        self.args, self.watch = args, watch
        self.model, self.optimizer, self.scheduler = model.to(args.device), optimizer, scheduler
        self.log = logging.getLogger("simclr")
        self.log.propagate = False
        self.log.setLevel(logging.DEBUG)
        self.handler = logging.FileHandler(os.path.join(self.args.log_dir, "training.log"))
        self.log.addHandler(self.handler)
        self.criterion = torch.nn.CrossEntropyLoss().to(self.args.device)
        self.losses = []

    def info_nce_loss(self, features):
        """Logits whose first column is the other view of the same picture, so all labels are 0."""
        rows = len(features)
        source = torch.arange(self.args.batch_size).repeat(self.args.n_views)
        same = source[:, None] == source[None, :]
        others = ~torch.eye(rows, dtype=torch.bool)  # not the row itself
        unit = F.normalize(features, dim=1)
        similarity = unit @ unit.T
        near = similarity[same & others].view(rows, -1)
        far = similarity[~same].view(rows, -1)
        logits = torch.cat([near, far], dim=1) / self.args.temperature
        return logits, torch.zeros(rows, dtype=torch.long)

    def train(self, train_loader):
        scaler = GradScaler("cpu", enabled=self.args.fp16_precision)
        with open(os.path.join(self.args.log_dir, "config.yml"), "w") as outfile:
            yaml.dump({k: v for k, v in vars(self.args).items() if k != "log_dir"}, outfile)
        n_iter = 0
        self.log.info(f"Start SimCLR training for {self.args.epochs} epochs.")
        with self.watch(self.model, self.optimizer, loader=train_loader, scaler=scaler, scheduler=self.scheduler):
            for epoch_counter in range(self.args.epochs):
                for images, _ in tqdm(train_loader):
                    images = torch.cat(images).to(self.args.device)
                    with autocast("cpu", dtype=torch.bfloat16, enabled=self.args.fp16_precision):
                        logits, labels = self.info_nce_loss(self.model(images))
                        loss = self.criterion(logits, labels)

                    self.optimizer.zero_grad()
                    scaler.scale(loss).backward()
                    scaler.step(self.optimizer)
                    scaler.update()

                    self.losses.append(loss.item())
                    if n_iter % self.args.log_every_n_steps == 0:
                        top1, top5 = accuracy(logits, labels, topk=(1, 5))
                        self.log.info(f"{n_iter}\tloss {loss.item():.4f}\tacc/top1 {top1:.2f}\tacc/top5 {top5:.2f}")
                    n_iter += 1
                # warmup for the first epochs
                if epoch_counter >= 2:
                    self.scheduler.step()
                self.log.debug(f"Epoch: {epoch_counter}\tLoss: {loss}\tTop1 accuracy: {top1}")
        self.log.info("Training has finished.")
        saved = {"epoch": self.args.epochs, "arch": self.args.arch}
        saved |= {"state_dict": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(saved, os.path.join(self.args.log_dir, f"checkpoint_{self.args.epochs:04d}.pth.tar"))
        self.log.removeHandler(self.handler)
        self.handler.close()


def main(watch, seed, folder):
    args = Namespace(
        arch="resnet-tiny", batch_size=64, epochs=8, lr=0.003, weight_decay=1e-4, out_dim=32, temperature=0.1,
        n_views=2, log_every_n_steps=10, fp16_precision=True, device="cpu", seed=seed, log_dir=str(folder),
    )  # fmt: skip
    assert args.n_views == 2, "Only two view training is supported."
    torch.manual_seed(args.seed)
    train_dataset = ViewsOfDigits(Views(augmentation(), args.n_views))
    train_loader = DataLoader(train_dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = ResNetSimCLR(out_dim=args.out_dim)
    optimizer = torch.optim.Adam(model.parameters(), args.lr, weight_decay=args.weight_decay)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(train_loader), eta_min=0, last_epoch=-1)
    simclr = SimCLR(model=model, optimizer=optimizer, scheduler=scheduler, args=args, watch=watch)
    simclr.train(train_loader)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    last = sum(simclr.losses[-len(train_loader) :]) / len(train_loader)
    return Result("loss of the last epoch", last, 3.2, simclr.losses, objects, higher_is_better=False)
