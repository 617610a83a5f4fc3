"""``tw.log``: custom metrics, from inside a step, a loss or an observer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Never

from torch import Tensor

from trainwright.distributed.group import SOLO, World
from trainwright.errors import UsageError
from trainwright.runs.media import Loggable


def widest(value: Tensor) -> Tensor:
    """Return the value as float64, or as float32 on MPS, which has no float64."""
    return value.float() if value.device.type == "mps" else value.double()


RESERVED = ("loss", "grad_norm", "lr", "step_s", "wait_s", "skipped")
"""Names that the log uses itself."""


_collector: ContextVar[LoggedMeans | None] = ContextVar("collector of tw.log", default=None)


@contextmanager
def collecting(collector: LoggedMeans | None) -> Iterator[None]:
    """Send the figures of ``tw.log`` to ``collector`` within the context; None drops them."""
    token = _collector.set(collector)
    try:
        yield
    finally:
        _collector.reset(token)


def count_for(samples: float) -> None:
    """Set the number of samples that later calls of ``tw.log`` count for."""
    collector = _collector.get()
    if collector is not None:
        collector.weight = samples


def log(*unnamed: Never, **figures: float | Tensor | Loggable) -> None:
    """Log numbers, images, texts and histograms from inside a step, a loss or an observer of ``tw.fit``.

    Each record of the log has the mean of a number since the previous record, and the run's page plots it. A validation
    has the mean over its samples. A call in a loss is weighted by the samples of its batch; others have weight 1.
    For an exact mean over tokens or pixels return ``tw.Loss(total, weight, metrics)`` instead. Images, texts and
    histograms are not averaged: a record has the newest one of each name, a validation the first one. A tensor stays on
    its device until a record is due. Outside of a run this does nothing, so a loss that calls it can be used anywhere.
    A loop under ``tw.watch`` has ``watch.log``.

    Observers run after the record of a step is written, so their figures are in the next record.

    Args:
        **figures: Numbers, tensors of one element, ``tw.Image``, ``tw.Histogram`` or strings, by name.

    Raises:
        UsageError: A value has no name or another type, or the log itself uses the name, such as ``loss``.

    Example:
        >>> def loss(model, batch):
        ...     output, kl = model(batch[0])
        ...     tw.log(kl=kl, reconstruction=tw.Image(output[0]))
        ...     return torch.nn.functional.mse_loss(output, batch[0]) + kl
    """
    if unnamed:
        raise UsageError("tw.log: a figure has no name", remedy="write tw.log(name=value), or tw.log(**{'a/b': value})")
    collector = _collector.get()
    if collector is None:
        return
    numbers: dict[str, float | Tensor] = {}
    for name, value in figures.items():
        if name in RESERVED:
            raise UsageError(f"tw.log: the log has {name!r} already", remedy=f"choose another name, such as my_{name}")
        if isinstance(value, Loggable):
            collector.show(name, value)
            continue
        is_number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)
        if not is_number:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            what = f"tw.log: {name} is a {type(value).__name__}{shape}"
            remedy = "give a number, a tensor of one element (value.mean()), tw.Image(value) or tw.Histogram(value)"
            raise UsageError(what, remedy=remedy)
        numbers[name] = value
    collector.add(numbers)


class LoggedMeans:
    """The means of figures by name, and one image, text or histogram of each name.

    Tensors stay on their device until ``pop`` is called. ``weight`` applies to figures that are added from now on.
    ``shows_first``: keep the first image of each name instead of the newest.
    """

    def __init__(self, *, shows_first: bool = False) -> None:
        self.weight = 1.0
        self.shown: dict[str, Loggable] = {}
        self._shows_first = shows_first
        self._sums: dict[str, tuple[Tensor | float, float]] = {}

    def add(self, figures: Mapping[str, float | Tensor]) -> None:
        for name, value in figures.items():
            if not self.weight:
                continue
            if isinstance(value, Tensor):
                value = widest(value.detach().reshape(()))
            total, weight = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = total + value * self.weight, weight + self.weight

    def show(self, name: str, value: Loggable) -> None:
        if not (self._shows_first and name in self.shown):
            self.shown[name] = value

    def pop_shown(self) -> dict[str, Loggable]:
        """Return the images, texts and histograms of this rank and clear them."""
        shown, self.shown = self.shown, {}
        return shown

    def pop(self, world: World = SOLO) -> dict[str, float]:
        """Return the means over all ranks and clear them. Waits for the device."""
        mine = {name: (float(total), weight) for name, (total, weight) in self._sums.items()}
        self._sums = {}
        everywhere = world.collect(mine)
        names = dict.fromkeys(name for each in everywhere for name in each)
        sums = {name: [each[name] for each in everywhere if name in each] for name in names}
        return {name: sum(t for t, _ in each) / sum(w for _, w in each) for name, each in sums.items()}
