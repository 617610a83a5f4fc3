"""Sharpness-aware minimization (Foret et al. 2021): the gradient is taken where the loss is worst nearby."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from distillation import digits, net
from torch import Tensor

import trainwright as tw

RADIUS = 0.05


def step(state: tw.TrainState, batch: tw.StepBatch) -> Tensor:
    image, label = batch.data
    weights = list(state.model.parameters())
    loss = F.cross_entropy(state.model(image), label)
    slopes = torch.autograd.grad(loss, weights)
    scale = RADIUS / torch.nn.utils.get_total_norm(slopes)
    with torch.no_grad():
        here = [weight.clone() for weight in weights]
        torch._foreach_add_(weights, [slope * scale for slope in slopes])
    F.cross_entropy(state.model(image), label).backward()
    with torch.no_grad():
        torch._foreach_copy_(weights, here)
    state.optimizer.step()
    return loss


def main(steps: int = 200, resume: Path | None = None) -> tw.Result:
    torch.manual_seed(0)
    momentum = {"optimizer.args": {"momentum": 0.9}}
    return tw.fit(
        net(32),
        digits(),
        advance=step,
        optimizer="sgd",
        lr=0.05,
        schedule="cosine",
        batch=64,
        steps=steps,
        settings=momentum,
        resume=resume,
    )


if __name__ == "__main__":
    main()
