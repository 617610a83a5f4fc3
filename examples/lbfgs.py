"""L-BFGS: an optimizer that calls the loss itself, as often as it needs it (a closure)."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw


def curve(count: int = 64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, count)[:, None]
    return x, torch.sin(3 * x) + 0.05 * torch.randn(count, 1)


def step(state: tw.TrainState, batch: tw.StepBatch) -> Tensor:
    x, y = batch.data

    def closure() -> Tensor:
        state.optimizer.zero_grad()
        loss = F.mse_loss(state.model(x), y)
        loss.backward()
        return loss

    return state.optimizer.step(closure)


def main(steps: int = 50, resume: Path | None = None) -> tw.Result:
    data = curve()
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5)
    return tw.fit(model, data, advance=step, optimizer=optimizer, batch=64, steps=steps, resume=resume)


if __name__ == "__main__":
    main()
