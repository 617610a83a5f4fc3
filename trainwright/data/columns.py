"""Columns of one length, each of which has a row for every sample."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset


class Columns(Dataset[dict[str, Tensor]]):
    """A sample is a dict of the rows of ``columns``; each tensor has a first dimension of the same length."""

    deterministic = True

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self.columns = dict(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}

    def fetch_batch(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        """The collated batch of these samples."""
        rows = torch.from_numpy(np.asarray(indices, dtype=np.int64))
        return {name: column.index_select(0, rows) for name, column in self.columns.items()}
