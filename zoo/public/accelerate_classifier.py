"""After huggingface/accelerate, ``complete_cv_example.py``: frozen base, OneCycleLR, state saved, resumed mid-epoch."""

import argparse
import os

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset

from zoo.public import Result
from zoo.public.data import digits


class PetsDataset(Dataset):
    def __init__(self, images, labels, image_transform=None):
        self.images, self.labels, self.image_transform = images, labels, image_transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        image = torch.from_numpy(self.images[idx])[None]
        if self.image_transform is not None:
            image = self.image_transform(image)
        return {"image": image, "label": int(self.labels[idx])}


class PretrainedNet(nn.Module):
    """Fixed random filters, in place of a model from the hub, and a classifier."""

    def __init__(self, num_classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 48, 3, padding=1), nn.ReLU()
        )
        self.fc = nn.Sequential(nn.Flatten(), nn.Linear(48 * 16, 48), nn.ReLU(), nn.Linear(48, num_classes))

    def get_classifier(self):
        return self.fc

    def forward(self, x):
        return self.fc(self.features(x))


def training_function(config, args, watch):
    project = ProjectConfiguration(project_dir=args.output_dir)
    accelerator = Accelerator(cpu=True, mixed_precision=args.mixed_precision, project_config=project)
    lr, num_epochs, seed, batch_size = config["lr"], config["num_epochs"], config["seed"], config["batch_size"]
    checkpointing_steps = int(args.checkpointing_steps) if args.checkpointing_steps.isdigit() else "epoch"
    set_seed(seed)

    (x, y), (x_eval, y_eval) = digits("train"), digits("test")

    def train_tfm(image):
        return torch.roll(image, int(torch.randint(-1, 2, (1,))), dims=2)

    train_dataloader = DataLoader(PetsDataset(x, y, train_tfm), shuffle=True, batch_size=batch_size, num_workers=0)
    eval_dataloader = DataLoader(PetsDataset(x_eval, y_eval), shuffle=False, batch_size=batch_size, num_workers=0)

    model = PretrainedNet(num_classes=10)
    model = model.to(accelerator.device)
    for param in model.parameters():
        param.requires_grad = False
    for param in model.get_classifier().parameters():
        param.requires_grad = True
    mean, std = torch.tensor(0.3053).to(accelerator.device), torch.tensor(0.3760).to(accelerator.device)

    optimizer = torch.optim.Adam(params=model.parameters(), lr=lr / 25)
    lr_scheduler = OneCycleLR(optimizer=optimizer, max_lr=lr, epochs=num_epochs, steps_per_epoch=len(train_dataloader))
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    overall_step = 0
    starting_epoch = 0
    if args.resume_from_checkpoint:
        accelerator.print(f"Resumed from checkpoint: {args.resume_from_checkpoint}")
        accelerator.load_state(args.resume_from_checkpoint)
        training_difference = os.path.basename(args.resume_from_checkpoint)
        resume_step = int(training_difference.replace("step_", ""))
        starting_epoch = resume_step // len(train_dataloader)
        resume_step -= starting_epoch * len(train_dataloader)
        overall_step = starting_epoch * len(train_dataloader)

    history = []
    with watch(model, optimizer, loader=train_dataloader, scheduler=lr_scheduler):
        for epoch in range(starting_epoch, num_epochs):
            model.train()
            total_loss = 0
            if args.resume_from_checkpoint and epoch == starting_epoch and resume_step is not None:
                active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
                overall_step += resume_step
            else:
                active_dataloader = train_dataloader
            for batch in active_dataloader:
                batch = {k: v.to(accelerator.device) for k, v in batch.items()}
                inputs = (batch["image"] - mean) / std
                outputs = model(inputs)
                loss = torch.nn.functional.cross_entropy(outputs, batch["label"])
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                history.append(loss.item())
                overall_step += 1
                if isinstance(checkpointing_steps, int) and overall_step % checkpointing_steps == 0:
                    accelerator.save_state(os.path.join(args.output_dir, f"step_{overall_step}"))
                if overall_step == args.max_train_steps:
                    return None, history
            model.eval()
            accurate = 0
            num_elems = 0
            for _, batch in enumerate(eval_dataloader):
                batch = {k: v.to(accelerator.device) for k, v in batch.items()}
                inputs = (batch["image"] - mean) / std
                with torch.no_grad():
                    outputs = model(inputs)
                predictions = outputs.argmax(dim=-1)
                predictions, references = accelerator.gather_for_metrics((predictions, batch["label"]))
                accurate_preds = predictions == references
                num_elems += accurate_preds.shape[0]
                accurate += accurate_preds.long().sum()
            eval_metric = accurate.item() / num_elems
            accelerator.print(f"epoch {epoch}: {100 * eval_metric:.2f}")
            accelerator.print({"accuracy": 100 * eval_metric, "train_loss": total_loss.item() / len(train_dataloader)})
            if checkpointing_steps == "epoch":
                accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))
    accelerator.end_training()
    accelerator.save_model(model, os.path.join(args.output_dir, "final"))
    objects = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
    return Result("eval accuracy", 100 * eval_metric, 92, history, objects), history


def main(watch, seed, folder):
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--mixed_precision", type=str, default="no", choices=["no", "fp16", "bf16"])
    parser.add_argument("--checkpointing_steps", type=str, default="120")
    parser.add_argument("--max_train_steps", type=int, default=None)
    parser.add_argument("--output_dir", type=str, default=str(folder))
    parser.add_argument("--resume_from_checkpoint", type=str, default=None)
    config = {"lr": 1e-2, "num_epochs": 12, "seed": 42 + seed, "batch_size": 48}
    np.random.seed(seed)
    _, losses = training_function(config, parser.parse_args(["--max_train_steps", "130"]), watch)
    resume = ["--resume_from_checkpoint", os.path.join(str(folder), "step_120")]
    result, more = training_function(config, parser.parse_args(resume), watch)
    return Result(result.metric, result.value, result.bar, losses + more, result.objects)
