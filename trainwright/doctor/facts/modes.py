"""Train and eval modes of modules, during training and between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class EvalModule:
    """A module that has been in eval mode in the training passes since step ``since``."""

    module: str  # Its path
    since: int
    left: bool  # It was in train mode before
    depends: bool  # Its forward pass differs between the modes
    norm: bool  # It is a normalization with running statistics
    container: bool  # It has children
    trained: bool  # It has trainable weights; without any weights, the smallest enclosing module with weights has
    source: str | None = None  # Line that put it into eval mode


@dataclass
class ModesFacts:
    """Modes of all modules."""

    experiment: ClassVar[str] = "modes"
    steps: int = 0  # Steps so far
    depends: int = 0  # Number of modules whose forward pass differs between the modes
    norms: int = 0  # Number of normalizations with running statistics among them
    roots_in_eval: tuple[bool, ...] = ()  # For each watched model, True if it trains in eval mode
    eval: tuple[EvalModule, ...] = ()  # Modules that train in eval mode
    evaluated_in_train: tuple[int, ...] = ()  # Steps after which the model was evaluated in train mode, at most 16
    evaluated_in_eval: tuple[int, ...] = ()  # Steps after which the model was evaluated in eval mode, at most 16
    num_evaluated_in_train: int = 0  # Number of evaluations in train mode
    source: str | None = None  # Line of the first evaluation in train mode


@dataclass(frozen=True)
class Drop:
    """A function that drops values at random in eval mode, and the module that calls it."""

    module: str
    op: str


@dataclass(frozen=True)
class DropsFacts:
    """Functions that drop values while every module is in eval mode."""

    experiment: ClassVar[str] = "in_eval_mode"
    drops: tuple[Drop, ...] = ()


MIN_STILL = 2  # Evaluations in a row that equal the one before


@dataclass(frozen=True, kw_only=True)
class EvaluationFacts:
    """One evaluation."""

    experiment: ClassVar[str] = "evaluation"
    after: int  # The last step before it
    still: int = 0  # Evaluations in a row whose outputs equal those of the one before, though the weights have moved
    still_at: str | None = None  # Line of one of them
    is_copy: bool = False  # They evaluate another module than the trained one
    stale: int = 0  # Passes after which the loop read one tensor with the autograd graph of a training pass
    stale_at: str | None = None  # Line that reads it
    altered: float = 0.0  # Fraction of the samples that differ from those with equal labels in the last evaluation
    altered_at: str | None = None  # Line that calls the model with them
    is_shared: bool = False  # Their dataset is that of training, or shares data or transforms with it
    renamed: RenamedClasses | None = (
        None  # Classes whose samples are predicted as another class, each class as a different one
    )


@dataclass(frozen=True, kw_only=True)
class RenamedClasses:
    """An evaluation whose predictions are right if classes are renamed."""

    targets: tuple[int, ...]  # Classes by their targets
    predicted: tuple[int, ...]  # The class that most samples of each are predicted as
    right: float  # Fraction of predictions that equal the target
    right_renamed: float  # This fraction if the classes are renamed
    source: str | None = None  # Line of the evaluation
