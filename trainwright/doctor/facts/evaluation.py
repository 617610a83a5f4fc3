"""What is measured of evaluations: passes without gradients whose outputs are compared with targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """The inputs of an evaluation over ``rows``, compared with those of training.

    Attributes:
        shift: Distance of the means, in standard deviations of training.
        ratio: Standard deviation in the evaluation over that in training.
    """

    rows: int
    shift: float
    ratio: float


@dataclass(frozen=True, kw_only=True)
class EvaluationFacts:
    """One evaluation, after step ``after``: ``calls`` of the model over ``rows`` rows.

    ``losses`` are the means over a batch that loss functions returned; ``source`` is the line that calls the model.
    """

    experiment: ClassVar[str] = "evaluation"
    after: int
    calls: int
    rows: int
    losses: tuple[float, ...] = ()
    likeness: Likeness | None = None
    source: str | None = None
