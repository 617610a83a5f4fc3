"""Train and eval modes of modules, during training and between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class EvalModule:
    """A module that has been in eval mode in the training passes since step ``since``.

    Attributes:
        module: Its path.
        since: The step.
        left: It was in train mode before.
        depends: Its forward pass differs between the modes.
        norm: It is a normalization with running statistics.
        container: It has children.
        trained: It is trained; for a module without weights, the smallest enclosing module with weights is.
        source: Line that put it into eval mode.
    """

    module: str
    since: int
    left: bool
    depends: bool
    norm: bool
    container: bool
    trained: bool
    source: str | None = None


@dataclass(frozen=True)
class ModesFacts:
    """Modes of all modules.

    Attributes:
        steps: Steps so far.
        depends: Number of modules whose forward pass differs between the modes.
        norms: Number of normalizations with running statistics among them.
        roots_in_eval: For each watched model, True if it trains in eval mode.
        eval: Modules that train in eval mode.
        evaluated_in_train: Steps after which the model was evaluated in train mode, at most 16.
        evaluated_in_eval: Steps after which the model was evaluated in eval mode, at most 16.
        num_evaluated_in_train: Number of evaluations in train mode.
        source: Line of the first of them.
    """

    experiment: ClassVar[str] = "modes"
    steps: int
    depends: int
    norms: int
    roots_in_eval: tuple[bool, ...]
    eval: tuple[EvalModule, ...]
    evaluated_in_train: tuple[int, ...]
    evaluated_in_eval: tuple[int, ...]
    num_evaluated_in_train: int
    source: str | None = None


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
