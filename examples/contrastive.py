"""A contrastive loss over the whole global batch (SimCLR, Chen et al. 2020), with accumulation by gradient caching.

Every sample is compared with all others, so the loss is no sum over micro-batches. Gradient caching (Gao et al. 2021,
arXiv 2101.06983) embeds all of them without a graph, takes the gradient of the loss by the embeddings, and then takes
it back through the encoder, one micro-batch at a time: the memory of one micro-batch, the gradient of the whole batch.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw


def pairs(count: int = 256) -> tuple[Tensor, Tensor]:
    """Two views of each sample: the same point with other noise."""
    torch.manual_seed(0)
    point = torch.randn(count, 16)
    return point + 0.1 * torch.randn(count, 16), point + 0.1 * torch.randn(count, 16)


def info_nce(one: Tensor, other: Tensor) -> Tensor:
    """The two views of a sample should be nearer to each other than to any other sample of the batch."""
    scores = F.normalize(one, dim=1) @ F.normalize(other, dim=1).T / 0.1
    return F.cross_entropy(scores, torch.arange(len(one), device=one.device))


def step(state: tw.TrainState, batch: tw.StepBatch) -> Tensor:
    encoder, views = state.model, [micro.data for micro in batch.micro]
    with torch.no_grad():
        cached = [torch.cat([encoder(each[side]) for each in views]).requires_grad_() for side in (0, 1)]
    loss = info_nce(*cached)
    loss.backward()
    slopes = [each.grad.split([len(view[0]) for view in views]) for each in cached]
    for index, view in enumerate(views):
        torch.autograd.backward([encoder(view[side]) for side in (0, 1)], [slopes[side][index] for side in (0, 1)])
    state.optimizer.step()
    return loss


def main(steps: int = 200, resume: Path | None = None) -> tw.Result:
    data = pairs()
    encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    return tw.fit(
        encoder, data, advance=step, batch=64, accumulation=4, lr=3e-3, schedule="cosine", steps=steps, resume=resume
    )


if __name__ == "__main__":
    main()
