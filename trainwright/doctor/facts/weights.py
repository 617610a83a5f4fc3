"""Measurements of the weights: movement of each tensor, scale, learning rates, gradients of exactly 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

MAX_NAMES = 32
"""Maximum number of tensors that are listed for each property."""


@dataclass(frozen=True, kw_only=True)
class WeightsFacts:
    """The weights at an examination, compared with the initial ones and with those at the previous examination.

    Attributes:
        steps: Steps so far.
        updates: Updates at a learning rate above 0.
        tensors: Number of trainable tensors in optimizers with such a learning rate.
        moved: Number of these that have changed.
        zero_gradients: Matrices among these whose gradient was all zeros at every examination.
        zero_weights: Matrices that began as zeros and never moved.
        has_gradient: A tensor had a gradient other than 0.
        stands_since: The last step after which anything had changed.
        updates_since: Updates since then.
        frozen: Number of tensors in an optimizer that do not require a gradient.
        frozen_moved: Names of these that changed.
        worked_on: Weights that were written to so often before the first step that they must have been trained.
        since: Step of the previous examination.
        unchanged: Tensors that have not changed since then, or have a gradient of zeros.
        lowest_rate: The lowest learning rate of an update if it is below 0, else 0.
        lowest_at: Step of that update.
        at_0_since: The step since which the learning rates of all groups are 0; 0 if they are not.
        rate_before_0: The highest learning rate in the step before that.
        highest_rate: The highest learning rate.
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
    """Tied weights.

    Attributes:
        tied: Number of parameters that several modules shared at the start.
        broken: Names of parameters that are no longer shared.
        split: Names of different parameters that share memory.
    """

    experiment: ClassVar[str] = "ties"
    tied: int
    broken: tuple[tuple[str, ...], ...] = ()
    split: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class PretrainedFacts:
    """The origin of the weights of a model that Trainwright has built.

    Attributes:
        missing: Names of weights of the pretrained part that are not in its files.
        is_random: The model was built without pretrained weights.
        adapters: Number of layers with low-rank adapters.
    """

    experiment: ClassVar[str] = "pretrained"
    missing: tuple[str, ...] = ()
    is_random: bool = False
    adapters: int = 0


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """Weight matrices of equal shape and module class whose names differ in one number, ordered by it.

    Attributes:
        names: Names of the matrices. Matrices of zeros are left out.
        sizes: Root mean square of each.
        fan_in: Fan-in of the shape.
        is_row: The last part of the module's path is the number, as in ``layers.3``, not an earlier one, as in
            ``blocks.3.proj``.
    """

    names: tuple[str, ...]
    sizes: tuple[float, ...]
    fan_in: int
    is_row: bool


@dataclass(frozen=True, kw_only=True)
class ScalesFacts:
    """Scales of the weights before step ``first``: the number of groups, and the first groups of unequal scale."""

    experiment: ClassVar[str] = "weight_scales"
    first: int
    groups: int
    unequal: tuple[Neighbours, ...] = ()
