"""Self-supervised learning with an average of itself as the teacher (BYOL, Grill et al. 2020)."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from contrastive import pairs
from torch import Tensor, nn

import trainwright as tw

DECAY = 0.99


class Byol(nn.Module):
    """A student, its average, and what foretells the teacher's view from the student's."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.predictor = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))


def byol_loss(model: nn.Module, one: Tensor, other: Tensor) -> Tensor:
    def distance(seen: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            goal = model.teacher(target)
        return 2 - 2 * F.cosine_similarity(model.predictor(model.student(seen)), goal).mean()

    return distance(one, other) + distance(other, one)


def step(state: tw.TrainState, batch: tw.StepBatch) -> Tensor:
    loss = byol_loss(state.model, *batch.data)
    loss.backward()
    state.optimizer.step()
    with torch.no_grad():
        for average, weight in zip(state.model.teacher.parameters(), state.model.student.parameters(), strict=True):
            average.lerp_(weight, 1 - DECAY)
    return loss


def main(steps: int = 200, resume: Path | None = None) -> tw.Result:
    data = pairs()
    return tw.fit(Byol(), data, advance=step, batch=64, lr=3e-3, schedule="cosine", steps=steps, resume=resume)


if __name__ == "__main__":
    main()
