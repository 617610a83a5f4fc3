"""Averages of the weights: exponential moving average, and stochastic weight averaging (Izmailov et al. 2018)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import get_swa_avg_fn, get_swa_multi_avg_fn

from trainwright.checkpoint.codec import StateDict
from trainwright.checkpoint.names import plain_name
from trainwright.checkpoint.shards import divided_like, is_divided, locals_of
from trainwright.checkpoint.weights import unwrapped
from trainwright.errors import UsageError


class WeightAverage(ABC):
    """An average of the trainable weights.

    Attributes:
        shadow: The averaged tensors by name.
        num_updates: Number of updates in the average.
        norms: BatchNorm layers, by name, whose running statistics are copied into the average.
    """

    kind: ClassVar[str]

    def __init__(self, model: nn.Module, norms: dict[str, _BatchNorm] | None = None) -> None:
        self.num_updates = 0
        self.norms = norms or {}
        named = unwrapped(model).named_parameters()
        self._live = {plain_name(name): p for name, p in named if p.requires_grad}
        self.shadow: dict[str, Tensor] = {
            name: tensor.detach().clone() for name, tensor in (self._live | self._statistics()).items()
        }

    @abstractmethod
    def update(self, step: int) -> None:
        """Update the average. Called once after each optimizer step; ``step`` is the number of completed steps."""

    @property
    def is_complete(self) -> bool:
        """True if the model can be evaluated with the average."""
        return self.num_updates > 0

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Context in which the model has the averaged weights. The live weights are restored bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, live in self._live.items():
            if is_divided(live):  # FSDP holds views of the weight, so its data are exchanged in place
                _exchange(live, self.shadow[name])
            else:
                live.data, self.shadow[name] = self.shadow[name], live.data
        for name, statistic in self._statistics().items():
            _exchange(statistic, self.shadow[name])

    def _statistics(self) -> dict[str, Tensor]:
        return {
            f"{path}.{name}".lstrip("."): b for path, norm in self.norms.items() for name, b in norm.named_buffers()
        }

    def state_dict(self) -> StateDict:
        return {"kind": self.kind, "num_updates": self.num_updates, "shadow": self.shadow}

    @torch.no_grad()
    def load_state_dict(self, saved: StateDict) -> None:
        """Load the averages. A weight that was not averaged before starts with its live value, so load the weights
        first.

        An average of another kind is not continued. Raises ValueError for a tensor of another shape.
        """
        is_same = saved.get("kind", "ema") == self.kind
        self.num_updates = saved.get("num_updates", 0) if is_same else 0
        before = saved.get("shadow", {}) if is_same else {}
        for name, live in (self._live | self._statistics()).items():
            average, shadow = before.get(name, live), self.shadow[name]
            if average.shape != shadow.shape:  # copy_ would broadcast a smaller one
                raise ValueError(
                    f"the average of {name} is {tuple(average.shape)}, and the weight {tuple(shadow.shape)}"
                )
            shadow.copy_(divided_like(average, shadow))


class Ema(WeightAverage):
    """Exponential moving average of the weights (Polyak & Juditsky 1992).

    Computes shadow <- decay * shadow + (1 - decay) * weights after each optimizer step. The decay warms up as
    min(decay, (1 + n) / (10 + n)) over the n updates so far, so that the random initial weights are forgotten (as in
    TensorFlow's ExponentialMovingAverage).

    Args:
        model: The model whose trainable weights are averaged.
        decay: Between 0 and 1.

    Raises:
        UsageError: ``decay`` is out of range.
    """

    kind = "ema"

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 < decay < 1:
            raise UsageError(f"the decay of an average is between 0 and 1; got {decay!r}", remedy="write 0.999")
        self.decay = decay
        super().__init__(model)

    @torch.no_grad()
    def update(self, step: int = 0) -> None:
        """Update the average after an optimizer step: one multiply-add over the trainable weights."""
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        torch._foreach_lerp_(locals_of(self.shadow.values()), locals_of(self._live.values()), 1.0 - decay)
        self.num_updates += 1


class Swa(WeightAverage):
    """Mean of the weights after steps ``start``, ``start + every``, and so on, as torch's ``AveragedModel``.

    The running statistics of BatchNorm belong to the weights with which they were measured. The average holds a copy of
    the live statistics until they are measured with the averaged weights (``norms_are_current``).
    """

    kind = "swa"

    def __init__(self, model: nn.Module, start: int, every: int) -> None:
        modules = unwrapped(model).named_modules()
        norms = {plain_name(name): m for name, m in modules if isinstance(m, _BatchNorm) and m.track_running_stats}
        super().__init__(model, norms)
        self.start, self.every = start, every
        self.norms_are_current = False

    @property
    def is_complete(self) -> bool:
        return self.num_updates > 0 and (self.norms_are_current or not self.norms)

    @torch.no_grad()
    def update(self, step: int) -> None:
        if step < self.start or (step - self.start) % self.every:
            return
        shadow, live = locals_of(self.shadow[name] for name in self._live), locals_of(self._live.values())
        # a tensor, as in AveragedModel, because a plain number gives other last bits in float64
        count = torch.tensor(self.num_updates, device="cpu")
        if self.num_updates == 0:
            torch._foreach_copy_(shadow, live)
        elif live[0].device.type == "cpu":
            mean = get_swa_avg_fn()  # type: ignore[no-untyped-call]
            for average, weight in zip(shadow, live, strict=True):
                average.copy_(mean(average, weight, count))
        else:
            get_swa_multi_avg_fn()(shadow, live, count)  # type: ignore[no-untyped-call]
        for name, statistic in self._statistics().items():
            self.shadow[name].copy_(statistic)
        self.num_updates += 1
        self.norms_are_current = False

    def load_state_dict(self, saved: StateDict) -> None:
        super().load_state_dict(saved)
        self.norms_are_current = False


class NoAverage:
    """The null object of a run without an average."""

    kind = ""
    is_complete = False

    def update(self, step: int = 0) -> None: ...

    @contextmanager
    def swapped(self) -> Iterator[None]:
        yield

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, saved: StateDict) -> None: ...


def _exchange(one: Tensor, other: Tensor) -> None:
    before = one.detach().clone()
    one.copy_(other)
    other.copy_(before)
