"""What is measured of evaluations: passes without gradients whose outputs are compared with targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """The inputs of an evaluation over ``samples``, compared with those of training, for the median feature.

    Attributes:
        shift: Distance of the means in standard deviations of training; ``noise`` is its standard error.
        ratio: Standard deviation in the evaluation over that in training.
        is_cut: Training has whole numbers only, and most of the evaluation are none.
    """

    samples: int
    shift: float
    ratio: float
    noise: float
    is_cut: bool = False


@dataclass(frozen=True, kw_only=True)
class EvaluationFacts:
    """One evaluation, after step ``after``: ``calls`` of the model over ``rows`` rows.

    ``losses`` are the means over a batch that loss functions returned. ``training`` are paths of modules that depend on
    the mode and were in train mode, ``changed`` those of buffers that the evaluation changed.
    """

    experiment: ClassVar[str] = "evaluation"
    after: int
    calls: int
    rows: int
    losses: tuple[float, ...] = ()
    likeness: Likeness | None = None
    training: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
