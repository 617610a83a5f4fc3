"""Distillation (Hinton et al. 2015): a frozen teacher, which belongs to the loss and not to the model."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import trainwright as tw

TEMPERATURE = 2.0


def digits() -> tuple[Tensor, Tensor]:
    """Images (1797, 64) between 0 and 1, and their labels."""
    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


def net(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


class Distillation(nn.Module):
    """A loss with a module inside."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.teacher = teacher.eval().requires_grad_(False)

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tw.Loss:
        image, label = batch
        student = model(image)
        soft = F.log_softmax(self.teacher(image) / TEMPERATURE, dim=1)
        like_teacher = F.kl_div(F.log_softmax(student / TEMPERATURE, dim=1), soft, reduction="sum", log_target=True)
        hard = F.cross_entropy(student, label, reduction="sum")
        return tw.Loss(
            TEMPERATURE**2 * like_teacher + hard, float(len(label)), {"label": hard, "teacher": like_teacher}
        )


def main(steps: int = 300, resume: Path | None = None) -> tw.Result:
    torch.manual_seed(0)
    teacher, student = net(256), net(16)
    return tw.fit(
        student,
        digits(),
        Distillation(teacher),
        batch=64,
        steps=steps,
        lr=3e-3,
        schedule="cosine",
        clip=1.0,
        resume=resume,
    )


if __name__ == "__main__":
    main()
