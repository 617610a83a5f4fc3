"""Measurements of the weights: which tensors move and how far, their scale, learning rates, gradients of exactly 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

MAX_NAMES = 32
"""Tensors that are listed of each kind; of more, only the number."""


@dataclass(frozen=True, kw_only=True)
class WeightsFacts:
    """The weights at an examination, compared with the first ones and with those at the examination before.

    Attributes:
        updates: Updates at a learning rate above 0, of ``steps``.
        tensors: Trainable tensors of an optimizer with such a rate; ``moved`` of them have changed.
        zero_gradients: Matrices of these whose gradient was all zeros at every examination.
        zero_weights: Matrices that began as zeros and never moved.
        has_gradient: A tensor had a gradient other than 0.
        stands_since: The last step after which anything had changed; ``updates_since`` were made since then.
        frozen_moved: Tensors that cannot be trained, belong to an optimizer and changed, of ``frozen``.
        worked_on: Weights that were written to so often before the first step that they were trained.
        since: The step of the examination before; ``unchanged`` have not changed since, or have a gradient of zeros.
        lowest_rate: Below 0 where an update was made at such a learning rate, the lowest in step ``lowest_at``.
        at_0_since: The step since which the learning rates of all groups are 0 (0: they are not).
        rate_before_0: The highest rate in the step before.
    """

    experiment: ClassVar[str] = "weights"
    steps: int
    updates: int
    tensors: int = 0
    moved: int = 0
    zero_gradients: tuple[str, ...] = ()
    zero_weights: tuple[str, ...] = ()
    has_gradient: bool = False
    stands_since: int = 0
    updates_since: int = 0
    frozen: int = 0
    frozen_moved: tuple[str, ...] = ()
    worked_on: tuple[str, ...] = ()
    since: int = 0
    unchanged: tuple[str, ...] = ()
    lowest_rate: float = 0.0
    lowest_at: int = 0
    at_0_since: int = 0
    rate_before_0: float = 0.0
    highest_rate: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TiesFacts:
    """Weights that two modules shared at the start: ``broken`` are apart. ``split``: two parameters share memory."""

    experiment: ClassVar[str] = "ties"
    tied: int
    broken: tuple[tuple[str, ...], ...] = ()
    split: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """Weight matrices of one shape, of modules of one class, whose names differ in one number, in the order of it.

    ``sizes`` are root mean squares. Matrices of zeros are left out. ``is_row``: the modules themselves have the number,
    as ``layers.3``, not what they are in, as ``blocks.3.proj``.
    """

    names: tuple[str, ...]
    sizes: tuple[float, ...]
    fan_in: int
    is_row: bool


@dataclass(frozen=True, kw_only=True)
class ScalesFacts:
    """The sizes of weights before step ``first``: the first groups that are ``unequal``, of ``groups``."""

    experiment: ClassVar[str] = "weight_scales"
    first: int
    groups: int
    unequal: tuple[Neighbours, ...] = ()
