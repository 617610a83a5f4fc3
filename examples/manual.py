"""Manual optimization: truncated backpropagation through time, several updates along each long sequence."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw

CUT = 10


class Recurrent(nn.Module):
    """Foretells the next value."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(1, 16, batch_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, wave: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        output, memory = self.cell(wave, memory)
        return self.head(output), memory


def waves(count: int = 128, length: int = 41) -> Tensor:
    torch.manual_seed(0)
    return torch.sin(0.4 * torch.arange(length) + 6.28 * torch.rand(count, 1))[:, :, None]


def step(state: tw.TrainState, batch: tw.StepBatch) -> tw.Loss:
    (wave,) = batch.data
    memory, losses = None, []
    for now, following in zip(wave[:, :-1].split(CUT, dim=1), wave[:, 1:].split(CUT, dim=1), strict=True):
        guess, memory = state.model(now, memory)
        loss = F.mse_loss(guess, following)
        state.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
        state.optimizer.step()
        memory = memory.detach()
        losses.append(loss.detach())
    return tw.Loss(torch.stack(losses).sum(), float(len(losses)), {})


def main(steps: int = 100, resume: Path | None = None) -> tw.Result:
    data = waves()
    return tw.fit(Recurrent(), (data,), advance=step, batch=32, lr=5e-3, schedule="cosine", steps=steps, resume=resume)


if __name__ == "__main__":
    main()
