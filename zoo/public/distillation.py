"""After haitongli/knowledge-distillation-pytorch: a teacher is trained and kept, then a student with KD loss."""

import json
import logging
import os
import shutil
from argparse import Namespace

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from zoo.public import Result
from zoo.public.data import digits

logger = logging.getLogger("distillation")


class RunningAverage:
    def __init__(self):
        self.steps, self.total = 0, 0

    def update(self, val):
        self.total += val
        self.steps += 1

    def __call__(self):
        return self.total / float(self.steps)


class Teacher(nn.Module):
    def __init__(self, num_channels=24):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, num_channels, 3, padding=1), nn.BatchNorm2d(num_channels)
        self.conv2, self.bn2 = nn.Conv2d(num_channels, num_channels * 2, 3, padding=1), nn.BatchNorm2d(num_channels * 2)
        self.fc1, self.fcbn1 = nn.Linear(num_channels * 2 * 4, 64), nn.BatchNorm1d(64)
        self.fc2 = nn.Linear(64, 10)
        self.dropout_rate = 0.5

    def forward(self, s):
        s = F.relu(F.max_pool2d(self.bn1(self.conv1(s)), 2))
        s = F.relu(F.max_pool2d(self.bn2(self.conv2(s)), 2))
        s = s.view(s.size(0), -1)
        s = F.dropout(F.relu(self.fcbn1(self.fc1(s))), p=self.dropout_rate, training=self.training)
        return self.fc2(s)


class Net(nn.Module):
    """The student."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 24), nn.Linear(24, 10)

    def forward(self, s):
        return self.fc2(F.relu(self.fc1(s.flatten(1))))


def loss_fn(outputs, labels):
    return nn.CrossEntropyLoss()(outputs, labels)


def loss_fn_kd(outputs, labels, teacher_outputs, params):
    alpha, T = params.alpha, params.temperature
    kd = nn.KLDivLoss(reduction="batchmean")(F.log_softmax(outputs / T, dim=1), F.softmax(teacher_outputs / T, dim=1))
    return kd * (alpha * T * T) + F.cross_entropy(outputs, labels) * (1.0 - alpha)


def accuracy(outputs, labels):
    return np.sum(np.argmax(outputs, axis=1) == labels) / float(labels.size)


metrics = {"accuracy": accuracy}


def save_checkpoint(state, is_best, checkpoint):
    filepath = os.path.join(checkpoint, "last.pth.tar")
    torch.save(state, filepath)
    if is_best:
        shutil.copyfile(filepath, os.path.join(checkpoint, "best.pth.tar"))


def train(model, optimizer, compute_loss, dataloader, params, history):
    model.train()
    summ = []
    loss_avg = RunningAverage()
    with tqdm(total=len(dataloader)) as t:
        for i, (train_batch, labels_batch) in enumerate(dataloader):
            output_batch = model(train_batch)
            loss = compute_loss(output_batch, train_batch, labels_batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
            if i % params.save_summary_steps == 0:
                output_batch, labels_batch = output_batch.data.cpu().numpy(), labels_batch.data.cpu().numpy()
                summary_batch = {metric: metrics[metric](output_batch, labels_batch) for metric in metrics}
                summary_batch["loss"] = loss.item()
                summ.append(summary_batch)
            loss_avg.update(loss.item())
            t.set_postfix(loss=f"{loss_avg():05.3f}")
            t.update()
    metrics_mean = {metric: float(np.mean([x[metric] for x in summ])) for metric in summ[0]}
    logger.info("- Train metrics: " + " ; ".join(f"{k}: {v:05.3f}" for k, v in metrics_mean.items()))
    return metrics_mean


def evaluate(model, dataloader):
    model.eval()
    summ = []
    for data_batch, labels_batch in dataloader:
        output_batch = model(data_batch)
        loss = loss_fn(output_batch, labels_batch)
        output_batch, labels_batch = output_batch.data.cpu().numpy(), labels_batch.data.cpu().numpy()
        summary_batch = {metric: metrics[metric](output_batch, labels_batch) for metric in metrics}
        summary_batch["loss"] = loss.item()
        summ.append(summary_batch)
    metrics_mean = {metric: float(np.mean([x[metric] for x in summ])) for metric in summ[0]}
    logger.info("- Eval metrics : " + " ; ".join(f"{k}: {v:05.3f}" for k, v in metrics_mean.items()))
    return metrics_mean


def train_and_evaluate(model, loaders, optimizer, scheduler, compute_loss, params, model_dir, watch, history):
    os.makedirs(model_dir, exist_ok=True)
    train_loader, val_loader = loaders
    best_val_acc = 0.0
    with watch(model, optimizer, loader=train_loader, scheduler=scheduler):
        for epoch in range(params.num_epochs):
            logger.info(f"Epoch {epoch + 1}/{params.num_epochs}")
            train(model, optimizer, compute_loss, train_loader, params, history)
            scheduler.step()
            val_metrics = evaluate(model, val_loader)
            val_acc = val_metrics["accuracy"]
            is_best = val_acc >= best_val_acc
            state = {"epoch": epoch + 1, "state_dict": model.state_dict(), "optim_dict": optimizer.state_dict()}
            save_checkpoint(state, is_best, model_dir)
            if is_best:
                logger.info("- Found new best accuracy")
                best_val_acc = val_acc
                with open(os.path.join(model_dir, "metrics_val_best_weights.json"), "w") as f:
                    json.dump(val_metrics, f, indent=4)
    return best_val_acc


def main(watch, seed, folder):
    params = Namespace(
        learning_rate=3e-3,
        batch_size=48,
        num_epochs=10,
        save_summary_steps=10,
        alpha=0.9,
        temperature=4.0,
        seed=230 + seed,
    )
    handler = logging.FileHandler(folder / "train.log")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    torch.manual_seed(params.seed)

    def fetch_dataloader(split):
        x, y = digits(split)
        dataset = TensorDataset(torch.from_numpy(x)[:, None] * 2 - 0.6, torch.from_numpy(y))
        return DataLoader(dataset, batch_size=params.batch_size, shuffle=split == "train")

    loaders = fetch_dataloader("train"), fetch_dataloader("test")
    history = []

    teacher_model = Teacher()
    optimizer = optim.Adam(teacher_model.parameters(), lr=params.learning_rate)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.3)
    train_and_evaluate(
        teacher_model, loaders, optimizer, scheduler, lambda out, x, y: loss_fn(out, y), params,
        os.path.join(folder, "base_cnn"), watch, history,
    )  # fmt: skip

    checkpoint = torch.load(os.path.join(folder, "base_cnn", "best.pth.tar"))
    teacher_model.load_state_dict(checkpoint["state_dict"])
    teacher_model.eval()
    model = Net()
    optimizer = optim.Adam(model.parameters(), lr=params.learning_rate)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.3)
    params.num_epochs = 20

    def kd(output_batch, train_batch, labels_batch):
        with torch.no_grad():
            output_teacher_batch = teacher_model(train_batch)
        return loss_fn_kd(output_batch, labels_batch, output_teacher_batch, params)

    logger.info("First, load the teacher model and set to eval mode")
    best_val_acc = train_and_evaluate(
        model, loaders, optimizer, scheduler, kd, params, os.path.join(folder, "cnn_distill"), watch, history
    )
    logger.removeHandler(handler)
    handler.close()
    objects = {"teacher": teacher_model, "student": model, "optimizer": optimizer, "scheduler": scheduler}
    return Result("accuracy of the student", best_val_acc, 0.9, history, objects)
