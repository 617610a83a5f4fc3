"""The causal mask of a part of a sequence, made once for all blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class LastPositions:
    """What is added to the scores of queries that are the last positions of the keys; one tensor for all blocks.

    Each block would else keep one of its own for the backward pass, as large as positions of the part x positions of
    all before it. A copy begins without it.
    """

    def __init__(self) -> None:
        self._made: Tensor | None = None

    def __deepcopy__(self, memo: object) -> LastPositions:
        return LastPositions()

    def of(self, query: Tensor, key: Tensor) -> Tensor:
        """The mask, shape (queries, keys), in the dtype in which attention is computed."""
        shape, device = (query.shape[-2], key.shape[-2]), query.device
        is_cast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if is_cast else query.dtype
        made = self._made
        if made is None or (made.shape, made.dtype, made.device) != (shape, dtype, device) or made.is_inference():
            is_ahead = torch.ones(shape, dtype=torch.bool, device=device).triu(shape[1] - shape[0] + 1)
            made = self._made = torch.zeros(shape, dtype=dtype, device=device).masked_fill_(is_ahead, -math.inf)
        return made
