"""Measurements of evaluations: passes without gradients whose outputs are compared with targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class EvaluationFacts:
    """One evaluation."""

    experiment: ClassVar[str] = "evaluation"
    after: int  # The last step before it
    rows: int  # Number of rows
