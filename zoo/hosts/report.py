"""What a host gives back: its model, and the numbers that it shows to whoever trains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor, nn

Watch = Callable[..., AbstractContextManager[object]]
"""``tw.watch`` with its folder given, or something that does nothing."""


@dataclass(frozen=True)
class Report:
    """``shown`` is the last evaluation as the program prints it, ``parts`` what the model needs beside its weights."""

    model: nn.Module
    shown: Mapping[str, float]
    losses: Sequence[float]
    parts: Mapping[str, Tensor] = field(default_factory=dict)
