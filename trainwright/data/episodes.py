"""Seeds of episodes: the data of reinforcement learning, in which the loss plays."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainwright.errors import UsageError, require_choice

Split: TypeAlias = Literal["train", "val"]
FIRST_VAL_SEED = 1 << 30
"""First seed of validation sets."""


class Episodes(Dataset[tuple[Tensor]]):
    """``(seed,)`` for each episode; an environment that is reset with it starts in the same state."""

    deterministic = True

    def __init__(self, first: int, count: int) -> None:
        self.seeds = torch.arange(first, first + count, device="cpu")

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (self.seeds[index],)


def episodes(split: Split = "train", *, count: int = 4096) -> Episodes:
    """Seeds of episodes, for losses that play in an environment. The splits have no seed in common.

    Args:
        split: ``train`` or ``val``.
        count: Number of episodes in an epoch.

    Raises UsageError for a value that cannot be used.
    """
    require_choice("split", split, get_args(Split))
    if not 1 <= count <= FIRST_VAL_SEED:
        raise UsageError(f"count={count} is no number of episodes", remedy="try count=4096")
    return Episodes(FIRST_VAL_SEED if split == "val" else 0, count)
