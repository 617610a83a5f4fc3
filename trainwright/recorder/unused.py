"""Gradients that no optimizer has used when they are dropped: the loop may have used them by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainwright.recorder.live_sums import sums_of


class UnusedGradients:
    """``are_there``: no update came after the last backward pass. The weights are read once a loop has dropped some."""

    def __init__(self) -> None:
        self.are_there = self._are_dropped = False
        self._weights: Tensor | None = None  # at the last backward pass, as sums

    def on_gradients(self, parameters: Sequence[Tensor]) -> None:
        self.are_there = True
        if self._are_dropped:
            self._weights = sums_of(parameters)

    def on_zero_grad(self, parameters: Sequence[Tensor]) -> bool:
        """They are dropped. Returns whether weights have changed since they were made: the loop has used them."""
        self._are_dropped, self.are_there = True, False
        return self._weights is not None and not torch.equal(self._weights, sums_of(parameters))

    def on_stepped(self) -> None:
        self.are_there = False
