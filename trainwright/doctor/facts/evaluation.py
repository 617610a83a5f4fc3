"""Measurements of evaluations: passes without gradients whose outputs are compared with targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """The inputs of an evaluation over ``rows``, compared with those of training.

    Attributes:
        rows: Rows of the evaluation.
        shift: Distance between the means, in standard deviations of training.
        ratio: Standard deviation in evaluation / standard deviation in training.
    """

    rows: int
    shift: float
    ratio: float


@dataclass(frozen=True, kw_only=True)
class EvaluationFacts:
    """One evaluation.

    Attributes:
        after: The last step before it.
        rows: Number of rows.
        losses: Mean losses over a batch, as the loss functions returned them.
        likeness: Inputs compared with those of training; None if there are too few.
        source: Line that calls the model.
    """

    experiment: ClassVar[str] = "evaluation"
    after: int
    rows: int
    losses: tuple[float, ...] = ()
    likeness: Likeness | None = None
    source: str | None = None
