"""After kekmodel/FixMatch-pytorch: a labelled and an unlabelled loader zipped, pseudo labels, EMA, warmup cosine."""

import logging
import math
import os
import random
import shutil
import sys
import time
from argparse import Namespace
from copy import deepcopy

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler
from tqdm import tqdm

from zoo.public import Result
from zoo.public.data import digits

logger = logging.getLogger("fixmatch")


class AverageMeter:
    def __init__(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def weak(image):
    shift = random.randint(-1, 1)
    return torch.roll(image, shift, dims=2)


def strong(image):
    image = torch.roll(image, (random.randint(-1, 1), random.randint(-1, 1)), dims=(1, 2))
    image = (image * random.uniform(0.7, 1.2) + 0.15 * torch.randn_like(image)).clone()
    top, left = random.randint(0, 6), random.randint(0, 6)
    image[:, top : top + 2, left : left + 2] = 0.5
    return image


class TransformFixMatch:
    def __call__(self, x):
        return weak(x), strong(x)


class DigitsSSL(Dataset):
    def __init__(self, split, indexs=None, transform=None):
        data, targets = digits(split)
        self.data, self.targets = (data, targets) if indexs is None else (data[indexs], targets[indexs])
        self.transform = transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        img = torch.from_numpy(self.data[index])[None]
        return img if self.transform is None else self.transform(img), int(self.targets[index])


def x_u_split(args, labels):
    label_per_class = args.num_labeled // args.num_classes
    chosen = [np.random.choice(np.where(labels == i)[0], label_per_class, False) for i in range(args.num_classes)]
    labeled_idx = np.concatenate(chosen)
    if args.expand_labels or args.num_labeled < args.batch_size:
        num_expand_x = math.ceil(args.batch_size * args.eval_step / args.num_labeled)
        labeled_idx = np.hstack([labeled_idx for _ in range(num_expand_x)])
    np.random.shuffle(labeled_idx)
    return labeled_idx, np.arange(len(labels))


class ModelEMA:
    def __init__(self, model, decay):
        self.ema = deepcopy(model)
        self.ema.eval()
        self.decay = decay
        self.param_keys = [k for k, _ in self.ema.named_parameters()]
        self.buffer_keys = [k for k, _ in self.ema.named_buffers()]
        for p in self.ema.parameters():
            p.requires_grad_(False)

    def update(self, model):
        with torch.no_grad():
            msd, esd = model.state_dict(), self.ema.state_dict()
            for k in self.param_keys:
                esd[k].copy_(esd[k] * self.decay + (1.0 - self.decay) * msd[k].detach())
            for k in self.buffer_keys:
                esd[k].copy_(msd[k])


class ConvNet(nn.Module):
    def __init__(self, num_classes, width=16):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width, momentum=0.01),
            nn.LeakyReLU(0.1, inplace=True),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width, momentum=0.01),
            nn.LeakyReLU(0.1, inplace=True),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width, momentum=0.01),
            nn.LeakyReLU(0.1, inplace=True),
        )
        self.fc = nn.Linear(2 * width, num_classes)

    def forward(self, x):
        return self.fc(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


def get_cosine_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps, num_cycles=7.0 / 16.0):
    def _lr_lambda(current_step):
        if current_step < num_warmup_steps:
            return float(current_step) / float(max(1, num_warmup_steps))
        done = float(current_step - num_warmup_steps) / float(max(1, num_training_steps - num_warmup_steps))
        return max(0.0, math.cos(math.pi * num_cycles * done))

    return LambdaLR(optimizer, _lr_lambda)


def accuracy(output, target, topk=(1,)):
    _, pred = output.topk(max(topk), 1, True, True)
    correct = pred.t().eq(target.reshape(1, -1).expand_as(pred.t()))
    return [correct[:k].reshape(-1).float().sum(0).mul_(100.0 / target.size(0)) for k in topk]


def save_checkpoint(state, is_best, checkpoint, filename="checkpoint.pth.tar"):
    filepath = os.path.join(checkpoint, filename)
    torch.save(state, filepath)
    if is_best:
        shutil.copyfile(filepath, os.path.join(checkpoint, "model_best.pth.tar"))


def train(args, labeled_trainloader, unlabeled_trainloader, model, optimizer, ema_model, scheduler, epoch, history):
    batch_time, data_time = AverageMeter(), AverageMeter()
    losses, losses_x, losses_u, mask_probs = AverageMeter(), AverageMeter(), AverageMeter(), AverageMeter()
    end = time.time()
    p_bar = tqdm(range(args.eval_step))
    labeled_iter, unlabeled_iter = iter(labeled_trainloader), iter(unlabeled_trainloader)
    model.train()
    for batch_idx in range(args.eval_step):
        try:
            inputs_x, targets_x = next(labeled_iter)
        except StopIteration:
            labeled_iter = iter(labeled_trainloader)
            inputs_x, targets_x = next(labeled_iter)
        try:
            (inputs_u_w, inputs_u_s), _ = next(unlabeled_iter)
        except StopIteration:
            unlabeled_iter = iter(unlabeled_trainloader)
            (inputs_u_w, inputs_u_s), _ = next(unlabeled_iter)

        data_time.update(time.time() - end)
        batch_size = inputs_x.shape[0]
        inputs = torch.cat((inputs_x, inputs_u_w, inputs_u_s)).to(args.device)
        targets_x = targets_x.to(args.device)
        logits = model(inputs)
        logits_x = logits[:batch_size]
        logits_u_w, logits_u_s = logits[batch_size:].chunk(2)
        del logits

        Lx = F.cross_entropy(logits_x, targets_x, reduction="mean")
        pseudo_label = torch.softmax(logits_u_w.detach() / args.T, dim=-1)
        max_probs, targets_u = torch.max(pseudo_label, dim=-1)
        mask = max_probs.ge(args.threshold).float()
        Lu = (F.cross_entropy(logits_u_s, targets_u, reduction="none") * mask).mean()
        loss = Lx + args.lambda_u * Lu
        loss.backward()

        losses.update(loss.item())
        losses_x.update(Lx.item())
        losses_u.update(Lu.item())
        history.append(loss.item())
        optimizer.step()
        scheduler.step()
        ema_model.update(model)
        model.zero_grad()

        batch_time.update(time.time() - end)
        end = time.time()
        mask_probs.update(mask.mean().item())
        p_bar.set_description(
            f"Train Epoch: {epoch + 1}/{args.epochs:4}. Iter: {batch_idx + 1:4}/{args.eval_step:4}. "
            f"LR: {scheduler.get_last_lr()[0]:.4f}. Data: {data_time.avg:.3f}s. Batch: {batch_time.avg:.3f}s. "
            f"Loss: {losses.avg:.4f}. Loss_x: {losses_x.avg:.4f}. Mask: {mask_probs.avg:.2f}. "
        )
        p_bar.update()
    p_bar.close()
    return losses.avg, losses_x.avg, losses_u.avg, mask_probs.avg


def test(args, test_loader, model):
    losses, top1, top5 = AverageMeter(), AverageMeter(), AverageMeter()
    test_loader = tqdm(test_loader)
    with torch.no_grad():
        for batch_idx, (inputs, targets) in enumerate(test_loader):
            model.eval()
            outputs = model(inputs.to(args.device))
            loss = F.cross_entropy(outputs, targets)
            prec1, prec5 = accuracy(outputs, targets, topk=(1, 5))
            losses.update(loss.item(), inputs.shape[0])
            top1.update(prec1.item(), inputs.shape[0])
            top5.update(prec5.item(), inputs.shape[0])
            test_loader.set_description(f"Test Iter: {batch_idx + 1:4}/{len(test_loader):4}. Loss: {losses.avg:.4f}. ")
        test_loader.close()
    logger.info(f"top-1 acc: {top1.avg:.2f}")
    logger.info(f"top-5 acc: {top5.avg:.2f}")
    return losses.avg, top1.avg


def main(watch, seed, folder):
    args = Namespace(
        num_labeled=100, num_classes=10, expand_labels=True, epochs=5, eval_step=70, batch_size=24, mu=3, lr=0.03,
        warmup=0, wdecay=5e-4, nesterov=True, ema_decay=0.97, lambda_u=1.0, T=1.0, threshold=0.95, seed=seed,
        out=str(folder), device="cpu",
    )  # fmt: skip
    handler = logging.StreamHandler(sys.stdout)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)

    _, labels = digits("train")
    labeled_idxs, unlabeled_idxs = x_u_split(args, labels)
    labeled_dataset = DigitsSSL("train", labeled_idxs, transform=weak)
    unlabeled_dataset = DigitsSSL("train", unlabeled_idxs, transform=TransformFixMatch())
    test_dataset = DigitsSSL("test")
    labeled_trainloader = DataLoader(
        labeled_dataset, sampler=RandomSampler(labeled_dataset), batch_size=args.batch_size, drop_last=True
    )
    unlabeled_trainloader = DataLoader(
        unlabeled_dataset,
        sampler=RandomSampler(unlabeled_dataset),
        batch_size=args.batch_size * args.mu,
        drop_last=True,
    )
    test_loader = DataLoader(test_dataset, sampler=SequentialSampler(test_dataset), batch_size=128)

    model = ConvNet(args.num_classes).to(args.device)
    logger.info(f"Total params: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M")
    no_decay = ["bias", "bn"]
    grouped_parameters = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": args.wdecay,
        },
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = optim.SGD(grouped_parameters, lr=args.lr, momentum=0.9, nesterov=args.nesterov)
    total_steps = args.epochs * args.eval_step
    scheduler = get_cosine_schedule_with_warmup(optimizer, args.warmup, total_steps)
    ema_model = ModelEMA(model, args.ema_decay)

    logger.info("***** Running training *****")
    logger.info(f"  Task = digits@{args.num_labeled}")
    logger.info(f"  Num Epochs = {args.epochs}")
    logger.info(f"  Batch size per GPU = {args.batch_size}")
    logger.info(f"  Total optimization steps = {total_steps}")
    best_acc, test_accs, history = 0, [], []
    model.zero_grad()
    with watch(model, optimizer, loader=[labeled_trainloader, unlabeled_trainloader], scheduler=scheduler):
        for epoch in range(args.epochs):
            train(
                args, labeled_trainloader, unlabeled_trainloader, model, optimizer, ema_model, scheduler, epoch, history
            )
            _, test_acc = test(args, test_loader, ema_model.ema)
            is_best = test_acc > best_acc
            best_acc = max(test_acc, best_acc)
            save_checkpoint(
                {
                    "epoch": epoch + 1,
                    "state_dict": model.state_dict(),
                    "ema_state_dict": ema_model.ema.state_dict(),
                    "acc": test_acc,
                    "best_acc": best_acc,
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                },
                is_best,
                args.out,
            )
            test_accs.append(test_acc)
            logger.info(f"Best top-1 acc: {best_acc:.2f}")
            logger.info(f"Mean top-1 acc: {np.mean(test_accs[-20:]):.2f}\n")
    logger.removeHandler(handler)
    objects = {"model": model, "ema": ema_model.ema, "optimizer": optimizer, "scheduler": scheduler}
    return Result("top-1 accuracy", best_acc, 75, history, objects)
