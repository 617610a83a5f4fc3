"""Measurements of weights that stay as they were initialised: evaluated copies, new heads, running statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class UnmovedEvaluation:
    """Evaluations with weights from before the training."""

    kind: str  # Class of the evaluated module
    is_copy: bool  # True: a copy of the trained module; False: the trained module, with its initial weights
    steps: tuple[int, ...]  # The steps after which it was evaluated, at most the first 8
    source: str | None  # Line of the first of these calls


@dataclass(frozen=True)
class UnmovedFacts:
    """Evaluations with weights that did not move since the watch began, while the trained weights did."""

    experiment: ClassVar[str] = "unmoved"
    steps: int  # Steps so far
    evaluations: tuple[UnmovedEvaluation, ...] = ()


@dataclass(frozen=True)
class HeadFacts:
    """The last linear layer of a model: frozen, with freshly initialised weights, and with gradients through it."""

    experiment: ClassVar[str] = "head"
    module: str  # Path of the layer
    outputs: int  # Number of its outputs
    trained: int  # Number of parameters of the model that an optimizer trains


@dataclass(frozen=True)
class RunningStatistics:
    """A BatchNorm in train mode whose momentum is 0 or near 1."""

    module: str  # Path of the layer
    momentum: float
    is_initial: bool  # The running mean is 0 and the running variance is 1
    jump: float  # Median change of the running mean between two examinations, in standard deviations


@dataclass(frozen=True)
class StatisticsFacts:
    """The BatchNorms with an unusual momentum."""

    experiment: ClassVar[str] = "statistics"
    steps: int
    norms: tuple[RunningStatistics, ...]
