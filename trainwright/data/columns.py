"""Columns of one length with a row for each sample."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset


class Columns(Dataset[dict[str, Tensor]]):
    """A dataset of dicts with the rows of ``columns``, whose first dimensions are equal."""

    deterministic = True

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self.columns = dict(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}

    def fetch_batch(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the collated batch of these samples."""
        rows = torch.from_numpy(np.asarray(indices, dtype=np.int64))
        return {name: column.index_select(0, rows) for name, column in self.columns.items()}
