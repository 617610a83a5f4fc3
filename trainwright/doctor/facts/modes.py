"""Which modules were in train mode and which in eval mode, in training and between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class EvalModule:
    """A module that has been in eval mode in the training passes since step ``since``.

    Attributes:
        left: It was in train mode before.
        depends: Its forward pass differs between the modes.
        norm: It is a normalization with running statistics.
        container: It has children.
        trained: It, or the smallest module around it that has weights, is trained.
        source: The line that put it into eval mode.
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
    """``depends`` modules differ between the modes, ``norms`` of them are normalisations.

    ``evaluated_in_train`` and ``evaluated_in_eval`` are the steps (16 at most) after which the model was evaluated in
    that mode; ``num_evaluated_in_train`` counts all of the former, ``source`` is the line of the first of them.
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
    """The functions that drop values while every module is in eval mode."""

    experiment: ClassVar[str] = "in_eval_mode"
    drops: tuple[Drop, ...] = ()
