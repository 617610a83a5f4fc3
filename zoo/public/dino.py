"""After facebookresearch/dino: student and EMA teacher, multi-crop, centering, schedules as arrays, log.txt."""

import datetime
import itertools
import json
import math
import sys
import time
from argparse import Namespace
from collections import defaultdict

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from zoo.public import Result
from zoo.public.data import digits


class SmoothedValue:
    def __init__(self):
        self.values = []

    def update(self, value):
        self.values.append(value)

    @property
    def global_avg(self):
        return sum(self.values) / len(self.values)

    def __str__(self):
        return f"{float(np.median(self.values[-20:])):.6f} ({self.global_avg:.6f})"


class MetricLogger:
    def __init__(self, delimiter):
        self.meters, self.delimiter = defaultdict(SmoothedValue), delimiter

    def update(self, **kwargs):
        for k, v in kwargs.items():
            self.meters[k].update(v)

    def __str__(self):
        return self.delimiter.join(f"{name}: {meter}" for name, meter in self.meters.items())

    def log_every(self, iterable, print_freq, header):
        start = time.time()
        for i, obj in enumerate(iterable):
            yield obj
            if i % print_freq == 0 or i == len(iterable) - 1:
                print(f"{header}  [{i}/{len(iterable)}]  {self}  time: {time.time() - start:.4f}")
        print(f"{header} Total time: {datetime.timedelta(seconds=int(time.time() - start))}")


def cosine_scheduler(first, last, epochs, niter_per_ep, warmup_epochs=0):
    """The value of every iteration."""
    warmup = np.linspace(0, first, warmup_epochs * niter_per_ep)
    done = np.linspace(0, 1, epochs * niter_per_ep - len(warmup), endpoint=False)
    return np.concatenate([warmup, last + (first - last) * (1 + np.cos(np.pi * done)) / 2])


class DataAugmentationDINO:
    def __init__(self, local_crops_number):
        self.local_crops_number = local_crops_number

    def crop(self, image, size, out):
        top, left = torch.randint(0, 8 - size + 1, (2,)).tolist()
        crop = image[None, :, top : top + size, left : left + size]
        crop = F.interpolate(crop, size=out, mode="bilinear")[0]
        return (crop * (0.85 + 0.3 * torch.rand(1)) + 0.05 * torch.randn_like(crop) - 0.3) / 0.38

    def __call__(self, image):
        crops = [self.crop(image, 7, 8), self.crop(image, 6, 8)]
        return crops + [self.crop(image, 5, 6) for _ in range(self.local_crops_number)]


class DigitFolder(Dataset):
    def __init__(self, transform):
        (self.images, self.labels), self.transform = digits("train"), transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(torch.from_numpy(self.images[index])[None]), int(self.labels[index])


class ConvNet(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.embed_dim = 4 * width
        widths = [1, width, 2 * width, 4 * width]
        self.layers = nn.Sequential()
        for i, (a, b) in enumerate(zip(widths, widths[1:])):
            self.layers.append(nn.Conv2d(a, b, 3, stride=1 if i == 0 else 2, padding=1, bias=False))
            self.layers.append(nn.BatchNorm2d(b))
            self.layers.append(nn.ReLU(inplace=True))

    def forward(self, x):
        return F.adaptive_avg_pool2d(self.layers(x), 1).flatten(1)


class DINOHead(nn.Module):
    def __init__(self, in_dim, out_dim, use_bn=True, norm_last_layer=True, hidden_dim=96, bottleneck_dim=64):
        super().__init__()
        layers = [nn.Linear(in_dim, hidden_dim)]
        if use_bn:
            layers.append(nn.BatchNorm1d(hidden_dim))
        layers += [nn.GELU(), nn.Linear(hidden_dim, bottleneck_dim)]
        self.mlp = nn.Sequential(*layers)
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(bottleneck_dim, out_dim, bias=False))
        self.last_layer.parametrizations.weight.original0.data.fill_(1)
        if norm_last_layer:
            self.last_layer.parametrizations.weight.original0.requires_grad = False

    def forward(self, x):
        x = F.normalize(self.mlp(x), dim=-1, p=2)
        return self.last_layer(x)


class MultiCropWrapper(nn.Module):
    """One pass of the backbone for each size of crops, one pass of the head for all."""

    def __init__(self, backbone, head):
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, crops):
        by_size = itertools.groupby(crops, key=lambda crop: crop.shape[-1])
        return self.head(torch.cat([self.backbone(torch.cat(list(same))) for _, same in by_size]))


class DINOLoss(nn.Module):
    def __init__(self, out_dim, ncrops, warmup_temp, temp, warmup_epochs, nepochs, student_temp=0.1, momentum=0.9):
        super().__init__()
        self.student_temp, self.center_momentum, self.ncrops = student_temp, momentum, ncrops
        self.register_buffer("center", torch.zeros(1, out_dim))
        self.teacher_temp_schedule = np.concatenate(
            (np.linspace(warmup_temp, temp, warmup_epochs), np.ones(nepochs - warmup_epochs) * temp)
        )

    def forward(self, student_output, teacher_output, epoch):
        views = F.log_softmax(student_output / self.student_temp, dim=-1).chunk(self.ncrops)
        sharp = (teacher_output - self.center) / self.teacher_temp_schedule[epoch]
        wanted = sharp.softmax(-1).detach().chunk(2)
        total_loss, n_loss_terms = 0, 0
        for i, q in enumerate(wanted):
            for j, log_p in enumerate(views):
                if i != j:  # not a view with itself
                    total_loss += -(q * log_p).sum(-1).mean()
                    n_loss_terms += 1
        total_loss /= n_loss_terms
        self.update_center(teacher_output)
        return total_loss

    @torch.no_grad()
    def update_center(self, teacher_output):
        m = self.center_momentum
        self.center = m * self.center + (1 - m) * teacher_output.mean(0, keepdim=True)


def get_params_groups(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, others = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def clip_gradients(model, clip):
    """Each parameter by a norm of its own."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.mul_(min(1.0, clip / (p.grad.data.norm().item() + 1e-6)))


def cancel_gradients_last_layer(epoch, model, freeze_last_layer):
    for name, p in model.named_parameters():
        if epoch < freeze_last_layer and "last_layer" in name:
            p.grad = None


def train_one_epoch(student, teacher, dino_loss, data_loader, optimizer, schedules, epoch, args, history):
    lr_schedule, wd_schedule, momentum_schedule = schedules
    metric_logger = MetricLogger(delimiter="  ")
    header = f"Epoch: [{epoch}/{args.epochs}]"
    for step, (images, _) in enumerate(metric_logger.log_every(data_loader, 10, header)):
        it = len(data_loader) * epoch + step
        optimizer.param_groups[0]["weight_decay"] = wd_schedule[it]
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr_schedule[it]

        targets = teacher(images[:2])  # the teacher sees the two large crops alone
        loss = dino_loss(student(images), targets, epoch)
        if not math.isfinite(loss.item()):
            sys.exit(f"Loss is {loss.item()}, stopping training")

        optimizer.zero_grad()
        loss.backward()
        clip_gradients(student, args.clip_grad)
        cancel_gradients_last_layer(epoch, student, args.freeze_last_layer)
        optimizer.step()

        with torch.no_grad():
            m = momentum_schedule[it]
            for new, averaged in zip(student.parameters(), teacher.parameters()):
                averaged.data.mul_(m).add_((1 - m) * new.data)

        history.append(loss.item())
        group = optimizer.param_groups[0]
        metric_logger.update(loss=loss.item(), lr=group["lr"], wd=group["weight_decay"])
    print("Averaged stats:", metric_logger)
    return {k: meter.global_avg for k, meter in metric_logger.meters.items()}


@torch.no_grad()
def mean_entropy(teacher, dino_loss, temp):
    """The entropy of the prototypes over the test images: 0 if all images get one."""
    teacher.eval()
    output = teacher([(torch.from_numpy(digits("test")[0])[:, None] - 0.3) / 0.38])
    mean = F.softmax((output - dino_loss.center) / temp, dim=-1).mean(0)
    return -(mean * mean.clamp_min(1e-12).log()).sum().item()


def main(watch, seed, folder):
    args = Namespace(
        arch="resnet_pico", out_dim=64, epochs=6, batch_size=64, local_crops_number=2, momentum_teacher=0.98, lr=0.01,
        min_lr=1e-4, warmup_epochs=1, weight_decay=0.04, weight_decay_end=0.1, warmup_teacher_temp=0.02,
        teacher_temp=0.025, warmup_teacher_temp_epochs=2, clip_grad=3.0, freeze_last_layer=1, saveckp_freq=3, seed=seed,
    )  # fmt: skip
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    print("\n".join(f"{k}: {v}" for k, v in sorted(vars(args).items())))
    dataset = DigitFolder(DataAugmentationDINO(args.local_crops_number))
    data_loader = DataLoader(dataset, shuffle=True, batch_size=args.batch_size, drop_last=True)
    print(f"Data loaded: there are {len(dataset)} images.")

    student, teacher = ConvNet(), ConvNet()
    student = MultiCropWrapper(student, DINOHead(student.embed_dim, args.out_dim))
    teacher = MultiCropWrapper(teacher, DINOHead(teacher.embed_dim, args.out_dim))
    teacher.load_state_dict(student.state_dict())
    for p in teacher.parameters():
        p.requires_grad = False
    print(f"Student and Teacher are built: they are both {args.arch} network.")
    temps = (args.warmup_teacher_temp, args.teacher_temp, args.warmup_teacher_temp_epochs)
    dino_loss = DINOLoss(args.out_dim, args.local_crops_number + 2, *temps, args.epochs)
    optimizer = torch.optim.AdamW(get_params_groups(student))
    niter = len(data_loader)
    schedules = (
        cosine_scheduler(args.lr * args.batch_size / 256.0 * 4, args.min_lr, args.epochs, niter, args.warmup_epochs),
        cosine_scheduler(args.weight_decay, args.weight_decay_end, args.epochs, niter),
        cosine_scheduler(args.momentum_teacher, 1, args.epochs, niter),
    )
    print("Loss, optimizer and schedulers ready.")

    start_time, history = time.time(), []
    print("Starting DINO training !")
    with watch(student, optimizer, loader=data_loader):
        for epoch in range(0, args.epochs):
            stats = train_one_epoch(
                student, teacher, dino_loss, data_loader, optimizer, schedules, epoch, args, history
            )
            parts = {"student": student, "teacher": teacher, "optimizer": optimizer, "dino_loss": dino_loss}
            save_dict = {"epoch": epoch + 1, "args": args} | {k: part.state_dict() for k, part in parts.items()}
            torch.save(save_dict, folder / "checkpoint.pth")
            if epoch % args.saveckp_freq == 0:
                torch.save(save_dict, folder / f"checkpoint{epoch:04}.pth")
            with open(folder / "log.txt", "a") as log:
                print(json.dumps({f"train_{k}": v for k, v in stats.items()} | {"epoch": epoch}), file=log)
    print(f"Training time {datetime.timedelta(seconds=int(time.time() - start_time))}")
    objects = {"student": student, "teacher": teacher, "optimizer": optimizer, "dino_loss": dino_loss}
    information = mean_entropy(teacher, dino_loss, args.teacher_temp) - sum(history[-20:]) / 20
    return Result("nats that a view tells of another", information, 0.3, history, objects)
