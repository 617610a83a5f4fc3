"""After pytorch/vision, ``references/classification``: MetricLogger, mixup, weight decay by group, warmup, EMA."""

import datetime
import time
from argparse import Namespace
from collections import defaultdict, deque

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import default_collate

from zoo.public import Result
from zoo.public.data import digits


class SmoothedValue:
    """A window of values, and their average over all time."""

    def __init__(self, window_size=20, fmt="{median:.4f} ({global_avg:.4f})"):
        self.deque = deque(maxlen=window_size)
        self.total, self.count, self.fmt = 0.0, 0, fmt

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n

    @property
    def median(self):
        return torch.tensor(list(self.deque)).median().item()

    @property
    def global_avg(self):
        return self.total / self.count

    @property
    def value(self):
        return self.deque[-1]

    def __str__(self):
        return self.fmt.format(median=self.median, global_avg=self.global_avg, value=self.value)


class MetricLogger:
    def __init__(self, delimiter="\t"):
        self.meters = defaultdict(SmoothedValue)
        self.delimiter = delimiter

    def update(self, **kwargs):
        for k, v in kwargs.items():
            self.meters[k].update(v.item() if isinstance(v, torch.Tensor) else v)

    def __getattr__(self, attr):
        if attr in self.__dict__.get("meters", {}):
            return self.meters[attr]
        raise AttributeError(attr)

    def __str__(self):
        return self.delimiter.join(f"{name}: {meter}" for name, meter in self.meters.items())

    def add_meter(self, name, meter):
        self.meters[name] = meter

    def log_every(self, iterable, print_freq, header):
        start_time = end = time.time()
        iter_time, data_time = SmoothedValue(fmt="{global_avg:.4f}"), SmoothedValue(fmt="{global_avg:.4f}")
        for i, obj in enumerate(iterable):
            data_time.update(time.time() - end)
            yield obj
            iter_time.update(time.time() - end)
            if i % print_freq == 0:
                eta = datetime.timedelta(seconds=int(iter_time.global_avg * (len(iterable) - i)))
                where = f"{header}  [{i}/{len(iterable)}]  eta: {eta}"
                print(self.delimiter.join([where, str(self), f"time: {iter_time}", f"data: {data_time}"]))
            end = time.time()
        print(f"{header} Total time: {datetime.timedelta(seconds=int(time.time() - start_time))}")


class ExponentialMovingAverage(torch.optim.swa_utils.AveragedModel):
    def __init__(self, model, decay, device="cpu"):
        def ema_avg(avg_model_param, model_param, num_averaged):
            return decay * avg_model_param + (1 - decay) * model_param

        super().__init__(model, device, ema_avg, use_buffers=True)


class RandomMixup(nn.Module):
    def __init__(self, num_classes, p=0.5, alpha=1.0):
        super().__init__()
        self.num_classes, self.p, self.alpha = num_classes, p, alpha

    def forward(self, batch, target):
        batch, target = batch.clone(), target.clone()
        target = nn.functional.one_hot(target, num_classes=self.num_classes).to(dtype=batch.dtype)
        if torch.rand(1).item() >= self.p:
            return batch, target
        lambda_param = float(torch._sample_dirichlet(torch.tensor([self.alpha, self.alpha]))[0])
        batch_rolled = batch.roll(1, 0).mul_(1.0 - lambda_param)
        batch.mul_(lambda_param).add_(batch_rolled)
        target_rolled = target.roll(1, 0).mul_(1.0 - lambda_param)
        target.mul_(lambda_param).add_(target_rolled)
        return batch, target


def accuracy(output, target, topk=(1,)):
    with torch.inference_mode():
        if target.ndim == 2:
            target = target.max(dim=1)[1]
        correct = output.topk(max(topk), 1).indices.t() == target[None]
        return [correct[:k].flatten().sum(dtype=torch.float32) * (100.0 / target.size(0)) for k in topk]


def set_weight_decay(model, weight_decay, norm_weight_decay):
    norms, others = [], []
    for module in model.modules():
        is_norm = isinstance(module, (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm))
        (norms if is_norm else others).extend(p for p in module.parameters(recurse=False) if p.requires_grad)
    return [{"params": norms, "weight_decay": norm_weight_decay}, {"params": others, "weight_decay": weight_decay}]


def convnet(num_classes):
    def block(a, b, stride):
        conv = nn.Conv2d(a, b, 3, stride, 1, groups=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(b), nn.Hardswish())

    features = nn.Sequential(block(1, 24, 1), block(24, 48, 2), block(48, 96, 2), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(features, nn.Flatten(), nn.Dropout(0.1), nn.Linear(96, num_classes))


def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args, model_ema, history):
    model.train()
    metric_logger = MetricLogger(delimiter="  ")
    metric_logger.add_meter("lr", SmoothedValue(window_size=1, fmt="{value}"))
    metric_logger.add_meter("img/s", SmoothedValue(window_size=10, fmt="{value}"))

    header = f"Epoch: [{epoch}]"
    for i, (image, target) in enumerate(metric_logger.log_every(data_loader, args.print_freq, header)):
        start_time = time.time()
        image, target = image.to(device), target.to(device)
        output = model(image)
        loss = criterion(output, target)

        optimizer.zero_grad()
        loss.backward()
        if args.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        optimizer.step()

        if model_ema and i % args.model_ema_steps == 0:
            model_ema.update_parameters(model)
            if epoch < args.lr_warmup_epochs:
                model_ema.n_averaged.fill_(0)  # keep copying the weights during warmup

        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        batch_size = image.shape[0]
        history.append(loss.item())
        metric_logger.update(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
        metric_logger.meters["acc1"].update(acc1.item(), n=batch_size)
        metric_logger.meters["acc5"].update(acc5.item(), n=batch_size)
        metric_logger.meters["img/s"].update(batch_size / (time.time() - start_time))


def evaluate(model, criterion, data_loader, device, print_freq=100, log_suffix=""):
    model.eval()
    metric_logger = MetricLogger(delimiter="  ")
    header = f"Test: {log_suffix}"
    num_processed_samples = 0
    with torch.inference_mode():
        for image, target in metric_logger.log_every(data_loader, print_freq, header):
            image = image.to(device, non_blocking=True)
            target = target.to(device, non_blocking=True)
            output = model(image)
            loss = criterion(output, target)
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            batch_size = image.shape[0]
            metric_logger.update(loss=loss.item())
            metric_logger.meters["acc1"].update(acc1.item(), n=batch_size)
            metric_logger.meters["acc5"].update(acc5.item(), n=batch_size)
            num_processed_samples += batch_size
    print(f"{header} Acc@1 {metric_logger.acc1.global_avg:.3f} Acc@5 {metric_logger.acc5.global_avg:.3f}")
    return metric_logger.acc1.global_avg


def main(watch, seed, folder):
    args = Namespace(
        device="cpu", batch_size=64, epochs=12, workers=0, lr=0.2, momentum=0.9, weight_decay=1e-4,
        norm_weight_decay=0.0, label_smoothing=0.1, mixup_alpha=0.2, lr_warmup_epochs=1, lr_warmup_decay=0.01,
        clip_grad_norm=1.0, model_ema_steps=4, model_ema_decay=0.98, print_freq=10, start_epoch=0, seed=seed,
    )  # fmt: skip
    print(args)
    torch.manual_seed(args.seed)
    device = torch.device(args.device)

    print("Loading data")
    st = time.time()
    (x, y), (x_test, y_test) = digits("train"), digits("test")
    dataset = TensorDataset(torch.from_numpy(x)[:, None] * 2 - 0.6, torch.from_numpy(y))
    dataset_test = TensorDataset(torch.from_numpy(x_test)[:, None] * 2 - 0.6, torch.from_numpy(y_test))
    train_sampler = torch.utils.data.RandomSampler(dataset)
    test_sampler = torch.utils.data.SequentialSampler(dataset_test)
    print("Took", time.time() - st, "s")

    mixup = RandomMixup(10, p=1.0, alpha=args.mixup_alpha)

    def collate_fn(batch):
        return mixup(*default_collate(batch))

    loading = {"batch_size": args.batch_size, "num_workers": args.workers}
    data_loader = DataLoader(dataset, sampler=train_sampler, collate_fn=collate_fn, **loading)
    data_loader_test = DataLoader(dataset_test, sampler=test_sampler, **loading)

    print("Creating model")
    model = convnet(10)
    model.to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    parameters = set_weight_decay(model, args.weight_decay, args.norm_weight_decay)
    optimizer = torch.optim.SGD(
        parameters, lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay, nesterov=True
    )
    main_lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=args.epochs - args.lr_warmup_epochs, eta_min=0.0
    )
    warmup_lr_scheduler = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=args.lr_warmup_decay, total_iters=args.lr_warmup_epochs
    )
    lr_scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer, schedulers=[warmup_lr_scheduler, main_lr_scheduler], milestones=[args.lr_warmup_epochs]
    )
    model_ema = ExponentialMovingAverage(model, device=device, decay=args.model_ema_decay)
    history = []

    print("Start training")
    start_time = time.time()
    with watch(model, optimizer, loader=data_loader, scheduler=lr_scheduler):
        for epoch in range(args.start_epoch, args.epochs):
            train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args, model_ema, history)
            lr_scheduler.step()
            evaluate(model, criterion, data_loader_test, device=device)
            accuracy1 = evaluate(model_ema, criterion, data_loader_test, device=device, log_suffix="EMA")
            checkpoint = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "lr_scheduler": lr_scheduler.state_dict(),
                "epoch": epoch,
                "args": args,
                "model_ema": model_ema.state_dict(),
            }
            torch.save(checkpoint, folder / f"model_{epoch}.pth")
            torch.save(checkpoint, folder / "checkpoint.pth")
    total_time_str = str(datetime.timedelta(seconds=int(time.time() - start_time)))
    print(f"Training time {total_time_str}")
    objects = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler, "model_ema": model_ema}
    return Result("EMA top-1 accuracy", accuracy1, 93, history, objects)
