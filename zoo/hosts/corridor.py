"""A world to act in: corridors with a goal. Mutants cannot touch it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

CELLS = 9


class Corridors:
    """``n`` corridors at once; what is seen is the cell one stands in and the cell of the goal, each one-hot."""

    def __init__(self, n: int, seed: int) -> None:
        self.n, self.draws = n, torch.Generator().manual_seed(7_919 * (seed + 1))
        self.at = self.goal = torch.zeros(n, dtype=torch.int64)

    def reset(self) -> Tensor:
        self.at = torch.randint(CELLS, (self.n,), generator=self.draws)
        self.goal = torch.randint(CELLS, (self.n,), generator=self.draws)
        return self.seen()

    def seen(self) -> Tensor:
        return torch.cat([F.one_hot(self.at, CELLS), F.one_hot(self.goal, CELLS)], 1).float()

    def step(self, move: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Moves 0, 1, 2: left, stay, right. What is seen then, the reward, and whether the goal is reached."""
        self.at = (self.at + move - 1).clamp(0, CELLS - 1)
        done = self.at == self.goal
        return self.seen(), done.float() - 0.05, done
