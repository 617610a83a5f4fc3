"""Exponential moving average of the weights (Polyak & Juditsky 1992)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainwright.errors import UsageError
from trainwright.state.codec import StateDict
from trainwright.state.names import plain_name
from trainwright.state.shards import divided_like, is_divided, locals_of
from trainwright.state.weights import unwrapped


class Ema:
    """Keeps shadow <- decay * shadow + (1 - decay) * weights, after each optimizer step.

    The decay warms up as min(decay, (1 + n) / (10 + n)) over the n updates so far, so that the random
    initial weights are forgotten (as in TensorFlow's ExponentialMovingAverage).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 < decay < 1:
            raise UsageError(f"the decay of an average is between 0 and 1; got {decay!r}", remedy="write 0.999")
        self.decay = decay
        self.num_updates = 0
        named = unwrapped(model).named_parameters()
        self._live = {plain_name(name): p for name, p in named if p.requires_grad}
        self.shadow: dict[str, Tensor] = {name: p.detach().clone() for name, p in self._live.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Once after each optimizer step; one multiply-add over the trainable weights."""
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        torch._foreach_lerp_(locals_of(self.shadow.values()), locals_of(self._live.values()), 1.0 - decay)
        self.num_updates += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The model computes with the averaged weights inside; the live ones come back bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, shadow in self.shadow.items():
            live = self._live[name]
            if is_divided(live):  # FSDP has views of it
                before = live.detach().clone()
                live.copy_(shadow)
                shadow.copy_(before)
            else:
                live.data, self.shadow[name] = shadow, live.data

    def state_dict(self) -> StateDict:
        return {"num_updates": self.num_updates, "shadow": self.shadow}

    @torch.no_grad()
    def load_state_dict(self, saved: StateDict) -> None:
        """Loads the averages. A weight that was not averaged before starts with its live value: load that first.

        Raises ValueError for an average of another shape.
        """
        self.num_updates = saved.get("num_updates", 0)
        before = saved.get("shadow", {})
        for name, shadow in self.shadow.items():
            average = before.get(name, self._live[name])
            if average.shape != shadow.shape:  # copy_ would repeat a smaller one
                raise ValueError(
                    f"the average of {name} is {tuple(average.shape)}, and the weight {tuple(shadow.shape)}"
                )
            shadow.copy_(divided_like(average, shadow))


class NoEma:
    """The null object of a run that keeps no average."""

    def update(self) -> None: ...

    @contextmanager
    def swapped(self) -> Iterator[None]:
        yield

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, saved: StateDict) -> None: ...
