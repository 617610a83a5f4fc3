"""The causal mask of a part of a sequence, created once for all blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class LastPositions:
    """The mask added to attention scores of queries at the last positions of the keys; one tensor for all blocks.

    Otherwise each block would store one for the backward pass, of size (positions of the part) x (positions up to its
    end). Copies start without it.
    """

    def __init__(self) -> None:
        self._made: Tensor | None = None

    def __deepcopy__(self, memo: object) -> LastPositions:
        return LastPositions()

    def of(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the mask, shape (queries, keys), in the dtype in which attention is computed."""
        shape, device = (query.shape[-2], key.shape[-2]), query.device
        is_cast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if is_cast else query.dtype
        made = self._made
        if made is None or (made.shape, made.dtype, made.device) != (shape, dtype, device) or made.is_inference():
            is_ahead = torch.ones(shape, dtype=torch.bool, device=device).triu(shape[1] - shape[0] + 1)
            made = self._made = torch.zeros(shape, dtype=dtype, device=device).masked_fill_(is_ahead, -math.inf)
        return made
