"""After huggingface/pytorch-image-models, ``train.py``: mixup, NativeScaler, ModelEma, schedule by update, saver."""

import csv
import logging
import math
import os
import shutil
import sys
import time
from argparse import Namespace
from collections import OrderedDict
from contextlib import suppress
from copy import deepcopy

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from zoo.public import Result
from zoo.public.data import digits

_logger = logging.getLogger("train")


class AverageMeter:
    def __init__(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class Mixup:
    """Mixup or cutmix of a batch with itself in reverse order, decided with NumPy's generator."""

    def __init__(self, mixup_alpha, cutmix_alpha, switch_prob, label_smoothing, num_classes):
        self.mixup_alpha, self.cutmix_alpha, self.switch_prob = mixup_alpha, cutmix_alpha, switch_prob
        self.label_smoothing, self.num_classes = label_smoothing, num_classes

    def one_hot(self, target):
        off = self.label_smoothing / self.num_classes
        on = 1.0 - self.label_smoothing + off
        full = torch.full((target.size(0), self.num_classes), off)
        return full.scatter_(1, target.view(-1, 1), on)

    def __call__(self, x, target):
        if np.random.rand() < self.switch_prob:
            lam = np.random.beta(self.cutmix_alpha, self.cutmix_alpha)
            height, width = x.shape[-2:]
            cut_h, cut_w = int(height * np.sqrt(1 - lam)), int(width * np.sqrt(1 - lam))
            top, left = np.random.randint(0, height - cut_h + 1), np.random.randint(0, width - cut_w + 1)
            patch = x.flip(0)[:, :, top : top + cut_h, left : left + cut_w].clone()
            x[:, :, top : top + cut_h, left : left + cut_w] = patch
            lam = 1.0 - cut_h * cut_w / (height * width)
        else:
            lam = np.random.beta(self.mixup_alpha, self.mixup_alpha)
            x_flipped = x.flip(0).mul_(1.0 - lam)
            x.mul_(lam).add_(x_flipped)
        return x, self.one_hot(target) * lam + self.one_hot(target.flip(0)) * (1.0 - lam)


class SoftTargetCrossEntropy(nn.Module):
    def forward(self, x, target):
        return torch.sum(-target * F.log_softmax(x, dim=-1), dim=-1).mean()


class DropPath(nn.Module):
    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep_prob)
        return x * mask.div_(keep_prob)


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride, drop_path_rate):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.act1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.drop_path = DropPath(drop_path_rate)
        self.downsample = nn.Identity()
        if stride != 1 or inplanes != planes:
            shortcut = nn.Conv2d(inplanes, planes, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(planes))
        nn.init.zeros_(self.bn2.weight)  # zero_init_last

    def forward(self, x):
        shortcut = self.downsample(x)
        x = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x)))))
        x = self.drop_path(x)
        x += shortcut
        return F.relu(x)


class ResNet(nn.Module):
    def __init__(self, num_classes=10, width=16, drop_path_rate=0.05):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.act1 = nn.ReLU(inplace=True)
        self.layer1 = BasicBlock(width, width, 1, 0.0)
        self.layer2 = BasicBlock(width, 2 * width, 2, drop_path_rate)
        self.global_pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1))
        self.fc = nn.Linear(2 * width, num_classes)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")

    def no_weight_decay(self):
        return set()

    def forward(self, x):
        x = self.act1(self.bn1(self.conv1(x)))
        return self.fc(self.global_pool(self.layer2(self.layer1(x))))


def param_groups_weight_decay(model, weight_decay):
    decay, no_decay = [], []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        (no_decay if param.ndim <= 1 or name in model.no_weight_decay() else decay).append(param)
    return [{"params": no_decay, "weight_decay": 0.0}, {"params": decay, "weight_decay": weight_decay}]


class CosineLRScheduler:
    """Sets the rate from the number of updates; warms up from ``warmup_lr_init``."""

    def __init__(self, optimizer, t_initial, lr_min, warmup_t, warmup_lr_init):
        self.optimizer, self.t_initial, self.lr_min = optimizer, t_initial, lr_min
        self.warmup_t, self.warmup_lr_init = warmup_t, warmup_lr_init
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.base_values = [group["initial_lr"] for group in optimizer.param_groups]
        self.step_update(0)

    def _get_lr(self, t, base):
        if t < self.warmup_t:
            return self.warmup_lr_init + t * (base - self.warmup_lr_init) / self.warmup_t
        return self.lr_min + 0.5 * (base - self.lr_min) * (1 + math.cos(math.pi * min(t / self.t_initial, 1.0)))

    def step_update(self, num_updates, metric=None):
        for group, base in zip(self.optimizer.param_groups, self.base_values):
            group["lr"] = self._get_lr(num_updates, base)

    def step(self, epoch, metric=None):
        pass  # by update

    def state_dict(self):
        return {key: value for key, value in self.__dict__.items() if key != "optimizer"}


class ModelEmaV2(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module = deepcopy(model)
        self.module.eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values()):
            ema_v.copy_(self.decay * ema_v + (1.0 - self.decay) * model_v)


class NativeScaler:
    state_dict_key = "amp_scaler"

    def __init__(self, device="cpu"):
        self._scaler = torch.amp.GradScaler(device=device, init_scale=2.0**10, growth_interval=40)

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, create_graph=False, need_update=True):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if need_update:
            if clip_grad is not None:
                self._scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
            self._scaler.step(optimizer)
            self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()


class CheckpointSaver:
    def __init__(self, model, optimizer, args, model_ema, amp_scaler, checkpoint_dir, max_history=2):
        self.model, self.optimizer, self.args = model, optimizer, args
        self.model_ema, self.amp_scaler = model_ema, amp_scaler
        self.checkpoint_dir, self.max_history = checkpoint_dir, max_history
        self.checkpoint_files = []

    def save_checkpoint(self, epoch, metric):
        last = os.path.join(self.checkpoint_dir, "last.pth.tar")
        torch.save(
            {
                "epoch": epoch,
                "arch": self.args.model,
                "state_dict": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "args": vars(self.args),
                self.amp_scaler.state_dict_key: self.amp_scaler.state_dict(),
                "state_dict_ema": self.model_ema.module.state_dict(),
                "metric": metric,
            },
            last,
        )
        path = os.path.join(self.checkpoint_dir, f"checkpoint-{epoch}.pth.tar")
        shutil.copyfile(last, path)
        self.checkpoint_files = sorted([*self.checkpoint_files, (path, metric)], key=lambda x: -x[1])
        for stale, _ in self.checkpoint_files[self.max_history :]:
            os.remove(stale)
        self.checkpoint_files = self.checkpoint_files[: self.max_history]
        if self.checkpoint_files[0][0] == path:
            shutil.copyfile(last, os.path.join(self.checkpoint_dir, "model_best.pth.tar"))
        _logger.info("Current checkpoints:\n%s", "\n".join(str(m) for _, m in self.checkpoint_files))
        return self.checkpoint_files[0][1]


def accuracy(output, target, topk=(1,)):
    _, pred = output.topk(max(topk), 1, True, True)
    correct = pred.t().eq(target.reshape(1, -1).expand_as(pred.t()))
    return [correct[:k].reshape(-1).float().sum(0) * 100.0 / target.size(0) for k in topk]


def train_one_epoch(
    epoch,
    model,
    loader,
    optimizer,
    loss_fn,
    args,
    mixup_fn,
    lr_scheduler,
    amp_autocast,
    loss_scaler,
    model_ema,
    history,
):
    second_order = hasattr(optimizer, "is_second_order") and optimizer.is_second_order
    batch_time_m, data_time_m, losses_m = AverageMeter(), AverageMeter(), AverageMeter()
    model.train()
    accum_steps = args.grad_accum_steps
    updates_per_epoch = (len(loader) + accum_steps - 1) // accum_steps
    num_updates = epoch * updates_per_epoch
    last_batch_idx = len(loader) - 1
    last_accum = len(loader) % accum_steps
    last_batch_idx_to_accum = len(loader) - last_accum
    end = time.time()
    optimizer.zero_grad()
    update_sample_count = 0
    for batch_idx, (input, target) in enumerate(loader):
        last_batch = batch_idx == last_batch_idx
        need_update = last_batch or (batch_idx + 1) % accum_steps == 0
        window = last_accum if last_accum and batch_idx >= last_batch_idx_to_accum else accum_steps
        data_time_m.update(time.time() - end)
        input, target = mixup_fn(input.clone(), target)

        with amp_autocast():
            output = model(input)
            loss = loss_fn(output, target)
        if accum_steps > 1:
            loss /= window
        params = model.parameters()
        loss_scaler(loss, optimizer, args.clip_grad, params, create_graph=second_order, need_update=need_update)

        losses_m.update(loss.item() * window, input.size(0))
        update_sample_count += input.size(0)
        if not need_update:
            continue
        num_updates += 1
        optimizer.zero_grad()
        model_ema.update(model)
        history.append(losses_m.val)

        batch_time_m.update(time.time() - end)
        if last_batch or (num_updates % args.log_interval) == 0:
            lr = sum(group["lr"] for group in optimizer.param_groups) / len(optimizer.param_groups)
            _logger.info(
                f"Train: {epoch} [{batch_idx:>4d}/{last_batch_idx} ({100.0 * batch_idx / last_batch_idx:>3.0f}%)]  "
                f"Loss: {losses_m.val:#.4g} ({losses_m.avg:#.3g})  "
                f"Time: {batch_time_m.val:.3f}s, {update_sample_count / batch_time_m.val:>7.2f}/s  "
                f"LR: {lr:.3e}  Data: {data_time_m.val:.3f} ({data_time_m.avg:.3f})"
            )
        lr_scheduler.step_update(num_updates=num_updates, metric=losses_m.avg)
        update_sample_count = 0
        end = time.time()
    return OrderedDict([("loss", losses_m.avg)])


def validate(model, loader, loss_fn, args, amp_autocast=suppress, log_suffix=""):
    batch_time_m, losses_m, top1_m, top5_m = AverageMeter(), AverageMeter(), AverageMeter(), AverageMeter()
    model.eval()
    end = time.time()
    last_idx = len(loader) - 1
    with torch.no_grad():
        for batch_idx, (input, target) in enumerate(loader):
            last_batch = batch_idx == last_idx
            with amp_autocast():
                output = model(input)
                loss = loss_fn(output, target)
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            losses_m.update(loss.item(), input.size(0))
            top1_m.update(acc1.item(), output.size(0))
            top5_m.update(acc5.item(), output.size(0))
            batch_time_m.update(time.time() - end)
            end = time.time()
            if last_batch or batch_idx % args.log_interval == 0:
                _logger.info(
                    f"Test{log_suffix}: [{batch_idx:>4d}/{last_idx}]  "
                    f"Time: {batch_time_m.val:.3f} ({batch_time_m.avg:.3f})  "
                    f"Loss: {losses_m.val:>7.3f} ({losses_m.avg:>6.3f})  "
                    f"Acc@1: {top1_m.val:>7.3f} ({top1_m.avg:>7.3f})  Acc@5: {top5_m.val:>7.3f} ({top5_m.avg:>7.3f})"
                )
    return OrderedDict([("loss", losses_m.avg), ("top1", top1_m.avg), ("top5", top5_m.avg)])


def update_summary(epoch, train_metrics, eval_metrics, filename, write_header):
    row = OrderedDict(epoch=epoch)
    row.update([("train_" + k, v) for k, v in train_metrics.items()])
    row.update([("eval_" + k, v) for k, v in eval_metrics.items()])
    with open(filename, mode="a") as cf:
        dw = csv.DictWriter(cf, fieldnames=row.keys())
        if write_header:
            dw.writeheader()
        dw.writerow(row)


def main(watch, seed, folder):
    args = Namespace(
        model="resnet6", batch_size=48, grad_accum_steps=2, epochs=9, lr=8e-3, min_lr=1e-5, warmup_lr=1e-5,
        warmup_epochs=1, weight_decay=0.05, clip_grad=1.0, mixup=0.2, cutmix=0.2, smoothing=0.1, log_interval=5,
        model_ema_decay=0.95, seed=42 + seed,
    )  # fmt: skip
    handler = logging.StreamHandler(sys.stdout)
    _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)
    _logger.propagate = False
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)

    model = ResNet()
    _logger.info(f"Model {args.model} created, param count:{sum(m.numel() for m in model.parameters())}")
    optimizer = torch.optim.AdamW(param_groups_weight_decay(model, args.weight_decay), lr=args.lr)
    loss_scaler = NativeScaler()
    model_ema = ModelEmaV2(model, decay=args.model_ema_decay)

    def amp_autocast():
        return torch.autocast("cpu", dtype=torch.bfloat16)

    def loader(split, train):
        x, y = digits(split)
        dataset = TensorDataset((torch.from_numpy(x)[:, None] - 0.3053) / 0.3760, torch.from_numpy(y))
        return DataLoader(dataset, batch_size=args.batch_size, shuffle=train, drop_last=train)

    loader_train, loader_eval = loader("train", True), loader("test", False)
    mixup_fn = Mixup(args.mixup, args.cutmix, 0.5, args.smoothing, 10)
    train_loss_fn, validate_loss_fn = SoftTargetCrossEntropy(), nn.CrossEntropyLoss()
    updates_per_epoch = (len(loader_train) + args.grad_accum_steps - 1) // args.grad_accum_steps
    lr_scheduler = CosineLRScheduler(
        optimizer,
        t_initial=args.epochs * updates_per_epoch,
        lr_min=args.min_lr,
        warmup_t=args.warmup_epochs * updates_per_epoch,
        warmup_lr_init=args.warmup_lr,
    )
    saver = CheckpointSaver(model, optimizer, args, model_ema, loss_scaler, str(folder))
    _logger.info(f"Scheduled epochs: {args.epochs}. LR stepped per update.")
    history = []
    with watch(model, optimizer, loader=loader_train, scaler=loss_scaler._scaler, accumulation=args.grad_accum_steps):
        for epoch in range(args.epochs):
            train_metrics = train_one_epoch(
                epoch, model, loader_train, optimizer, train_loss_fn, args, mixup_fn, lr_scheduler, amp_autocast,
                loss_scaler, model_ema, history,
            )  # fmt: skip
            validate(model, loader_eval, validate_loss_fn, args, amp_autocast)
            eval_metrics = validate(model_ema.module, loader_eval, validate_loss_fn, args, amp_autocast, " (EMA)")
            update_summary(epoch, train_metrics, eval_metrics, folder / "summary.csv", write_header=epoch == 0)
            best_metric = saver.save_checkpoint(epoch, eval_metrics["top1"])
            lr_scheduler.step(epoch + 1, eval_metrics["top1"])
    _logger.info(f"*** Best metric: {best_metric}")
    _logger.removeHandler(handler)
    objects = {"model": model, "optimizer": optimizer, "scaler": loss_scaler, "ema": model_ema}
    return Result("EMA top-1 accuracy", best_metric, 92, history, objects)
