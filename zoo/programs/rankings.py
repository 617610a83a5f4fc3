"""Legal training of rankings: by what a swap would do, and by which document is likely the first."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from zoo.programs.training import Batch, Training


def _asked(n: int) -> Batch:
    """Queries with 12 documents each (n, 12, 10), and how much each is to the point (n, 12), from 0 to 4."""
    x = torch.randn(n, 12, 10)
    worth = x[..., 0] + x[..., 1] * x[..., 2] + x[..., 3].abs() + 0.3 * torch.randn(n, 12)
    return x, torch.bucketize(worth, torch.tensor([-0.5, 0.7, 1.6, 2.6])).float()


def ranked(t: Training) -> None:
    """LambdaRank (Burges et al., 2006): no loss, but the force on each score, by what a swap would do to the NDCG."""
    t.data = TensorDataset(*_asked(768))
    t.model, t.epochs = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1)), 8

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,), (x, y) = training.optimizers, batch
        scores = training.model(x).squeeze(2)
        with torch.no_grad():
            gain, discount = 2**y - 1, 1 / torch.arange(2.0, 14.0).log2()
            best = (gain.sort(1, descending=True).values @ discount).clamp(min=1e-6)
            here = discount[scores.argsort(1, descending=True).argsort(1)]
            swap = (gain.unsqueeze(2) - gain.unsqueeze(1)) * (here.unsqueeze(2) - here.unsqueeze(1))
            wrong = (scores.unsqueeze(1) - scores.unsqueeze(2)).sigmoid() * (y.unsqueeze(2) > y.unsqueeze(1))
            force = wrong * swap.abs() / best[:, None, None]  # (queries, better, worse)
            slope = (force.sum(1) - force.sum(2)) / len(x)
        optimizer.zero_grad()
        scores.backward(slope)
        optimizer.step()
        return 1 - ((gain * here).sum(1) / best).mean()

    t.update = update


def ranked_lists(t: Training) -> None:
    """ListNet (Cao et al., 2007): how likely each document is the first, by the scores as by what is to the point."""
    t.data = TensorDataset(*_asked(768))
    t.model, t.epochs = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1)), 8
    t.loss = lambda model, batch: F.cross_entropy(model(batch[0]).squeeze(2), batch[1].softmax(1))
