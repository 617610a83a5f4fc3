"""Measurements of the weights: which tensors move and how far, learning rates, gradients of exactly 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

MAX_NAMES = 32
"""Tensors that are listed of each kind; of more, only the number."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """The root mean square of a weight at step ``since`` and now. ``usual`` is that of a fresh one."""

    name: str
    since: int
    before: float
    now: float
    usual: float
    steady: bool


@dataclass(frozen=True, kw_only=True)
class WeightsFacts:
    """The weights at an examination, compared with the first ones and with those at the examination before.

    Attributes:
        updates: Updates at a learning rate above 0, of ``steps``.
        tensors: Trainable tensors of an optimizer with such a rate; ``moved`` of them have changed.
        still: Those that have not changed for many updates, or only by decay: their gradient is 0.
        zero_gradients: Those whose gradient was all zeros at every examination.
        zero_weights: Matrices that began as zeros and never moved.
        has_gradient: A tensor had a gradient other than 0.
        stands_since: The last step after which anything had changed; ``updates_since`` were made since then.
        frozen_moved: Tensors that cannot be trained, belong to an optimizer and changed, of ``frozen``.
        frozen_still: Matrices that cannot be trained and never moved.
        worked_on: Weights that were written to so often before the first step that they were trained.
        since: The step of the examination before; ``unchanged`` have not changed since, or have a gradient of zeros.
        equal: Groups of weights of one container that began with equal random values.
        lowest_rate: Below 0 where an update was made at such a learning rate, the lowest in step ``lowest_at``.
        at_0_since: The step since which the learning rates of all groups are 0 (0: they are not).
        rate_before_0: The highest rate in the step before.
    """

    experiment: ClassVar[str] = "weights"
    steps: int
    updates: int
    tensors: int = 0
    moved: int = 0
    still: tuple[str, ...] = ()
    num_still: int = 0
    zero_gradients: tuple[str, ...] = ()
    zero_weights: tuple[str, ...] = ()
    has_gradient: bool = False
    stands_since: int = 0
    updates_since: int = 0
    frozen: int = 0
    frozen_moved: tuple[str, ...] = ()
    frozen_still: int = 0
    worked_on: tuple[str, ...] = ()
    since: int = 0
    unchanged: tuple[str, ...] = ()
    equal: tuple[tuple[str, ...], ...] = ()
    drifts: tuple[Drift, ...] = ()
    lowest_rate: float = 0.0
    lowest_at: int = 0
    at_0_since: int = 0
    rate_before_0: float = 0.0
    highest_rate: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StillTensor:
    """A trainable tensor without a gradient other than 0 in a step.

    ``effect``: relative change of the loss where it changes. ``reached``: it got a gradient, of 0. ``cancels``: a bias
    in a loss of differences.
    """

    name: str
    effect: float
    reached: bool
    cancels: bool = False


@dataclass(frozen=True, kw_only=True)
class StillFacts:
    """Whether the loss of a step depends on the tensors that get no gradient in it."""

    experiment: ClassVar[str] = "still_weights"
    tensors: tuple[StillTensor, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OtherRatesFacts:
    """Losses of updates on one batch alone, by a factor of the learning rate."""

    experiment: ClassVar[str] = "other_rates"
    factors: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    lr: float


@dataclass(frozen=True, kw_only=True)
class TiesFacts:
    """Weights that two modules shared at the start: ``broken`` are apart. ``split``: two parameters share memory."""

    experiment: ClassVar[str] = "ties"
    tied: int
    broken: tuple[tuple[str, ...], ...] = ()
    split: tuple[tuple[str, ...], ...] = ()
